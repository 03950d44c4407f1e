"""At which stage a peer fails, and what the survivor waits for then."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpipe import Agent, Pipe
from tests.peers import LARGE, MIB, Child

BLOCK_BYTES = MIB
NUM_BLOCKS = 64


@dataclass(frozen=True)
class Situation:
    """A peer that is about to fail, and what the survivor does with it, or with others."""

    child: Child
    operate: Callable[[float | None], Any]


@contextlib.contextmanager
def _child(program, *arguments):
    child = Child(program, *arguments)
    try:
        yield child
    finally:
        child.end()


def _newcomer(receiver):
    """What must work although another peer fails: to connect, and to send."""
    with Pipe.connect(receiver.address, timeout=5) as sender:
        sender.send_tensor(np.ones(4))
        receiver.recv_tensor(timeout=5)


@contextlib.contextmanager
def _half_a_handshake(num_bytes):
    with Pipe.listen() as receiver, _child("say_half_a_hello", receiver.address, num_bytes) as child:
        assert child.read() == "said"
        yield Situation(child, lambda _timeout: _newcomer(receiver))


def before_the_hello():
    """It has connected and said nothing."""
    return _half_a_handshake(0)


def mid_handshake():
    """It has said half of its hello."""
    return _half_a_handshake(20)


@contextlib.contextmanager
def offer_out():
    """It has offered a large tensor that nobody fetches yet."""
    with _open(Pipe.listen()) as receiver, _child("send_for_ever", receiver.address) as child:
        receiver.recv_tensor(timeout=60)
        out = np.empty(LARGE, np.uint8)
        yield Situation(child, lambda timeout: receiver.recv_tensor(out=out, timeout=timeout))


@contextlib.contextmanager
def sending():
    """It sends one large tensor after the other, and the survivor receives them."""
    with _open(Pipe.listen()) as receiver, _child("send_for_ever", receiver.address) as child:
        out = np.empty(LARGE, np.uint8)
        receiver.recv_tensor(out=out, timeout=60)
        yield Situation(child, lambda timeout: receiver.recv_tensor(out=out, timeout=timeout))


@contextlib.contextmanager
def before_the_acknowledgement():
    """It has been offered a tensor that it does not take."""
    with _child("receive_nothing") as child, _open(Pipe.connect(child.read())) as sender:
        tensor = np.ones(LARGE, np.uint8)
        yield Situation(child, lambda timeout: sender.send_tensor(tensor, timeout=timeout))


@contextlib.contextmanager
def receiving():
    """It receives one large tensor after the other."""
    with _child("receive_for_ever") as child, _open(Pipe.connect(child.read())) as sender:
        tensor = np.ones(LARGE, np.uint8)
        sender.send_tensor(tensor, timeout=60)
        yield Situation(child, lambda timeout: sender.send_tensor(tensor, timeout=timeout))


@contextlib.contextmanager
def serving_blocks():
    """Its blocks are being read."""
    memory = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    with _child("serve_blocks", NUM_BLOCKS, BLOCK_BYTES) as child, Agent() as agent:
        region = agent.register(memory, "own", BLOCK_BYTES)
        peer = agent.connect(child.read())
        plan = peer.prepare(region, range(NUM_BLOCKS), "kv", range(NUM_BLOCKS))
        plan.read().wait(60)
        yield Situation(child, lambda timeout: plan.read(timeout=timeout).wait())


@contextlib.contextmanager
def _open(pipe):
    """A pipe whose end fails: it is closed without complaints."""
    try:
        yield pipe
    finally:
        with contextlib.suppress(Exception):
            pipe.close(timeout=0)


# Those whose failure is nothing to the survivor, who serves others as before.
HARMLESS = (before_the_hello, mid_handshake)
FATAL = (offer_out, sending, before_the_acknowledgement, receiving, serving_blocks)
