"""At which stage a peer fails, and what the survivor waits for then."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kvpipe import Agent, KVPipeError, LookupBuffer, PeerLostError, Pipe
from kvpipe.launch.ports import free_ports
from tests.faults.forked import Forked
from tests.peers import LARGE, LOOPBACK, MIB, Child

BLOCK_BYTES = MIB
NUM_BLOCKS = 64
ENTRY_BYTES = 4 * MIB
TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Place:
    """Location of a peer: the survivor's address for it, its own address, and the function that starts it."""

    near: str = LOOPBACK
    far: str = LOOPBACK
    start: Callable[..., Child] = Forked


@dataclass(frozen=True)
class Server:
    """A peer that can be reached again: its address, the function that starts it there, and one that reaches it."""

    address: str
    start: Callable[[str], Child]
    reach: Callable[[], Any]


@dataclass(frozen=True)
class Situation:
    """A peer that is about to fail, and what the survivor does with it, or with others."""

    child: Child
    operate: Callable[[float | None], Any]
    server: Server | None = None

    def reach_again(self):
        """Reaches it once it is back. It may have to notice first that it was gone: seconds until then."""
        begun = time.monotonic()
        while True:
            try:
                self.server.reach()
            except KVPipeError:
                assert time.monotonic() - begun < TIMEOUT_S, "the peer that is back was not reached again"
                time.sleep(0.01)
            else:
                return time.monotonic() - begun


@contextlib.contextmanager
def _child(place, program, *arguments):
    child = place.start(program, *arguments)
    try:
        yield child
    finally:
        child.end()


@contextlib.contextmanager
def _serving(place, program, *arguments):
    """A peer that listens: the child, its address, and how to start it there again.

    A port that the kernel chooses may be another socket's by then.
    """
    with _child(place, program, *arguments, f"{place.far.rpartition(':')[0]}:{free_ports(1)[0]}") as child:
        yield child, child.read(), partial(place.start, program, *arguments)


@contextlib.contextmanager
def _open(pipe):
    """A pipe whose end fails: it is closed without complaints."""
    try:
        yield pipe
    finally:
        with contextlib.suppress(Exception):
            pipe.close(timeout=0)


def _newcomer(receiver):
    """Operations that must work although another peer fails: to connect, and to send."""
    with Pipe.connect(receiver.address, timeout=5) as sender:
        sender.send_tensor(np.ones(4))
        receiver.recv_tensor(timeout=5)


@contextlib.contextmanager
def _half_a_handshake(place, program, argument):
    with Pipe.listen(place.near) as receiver, _child(place, program, receiver.address, argument) as child:
        assert child.read() == "said"
        yield Situation(child, lambda _timeout: _newcomer(receiver))


def before_the_hello(place):
    """It has connected and said nothing."""
    return _half_a_handshake(place, "say_half_a_hello", 0)


def mid_handshake(place):
    """It has said half of its hello."""
    return _half_a_handshake(place, "say_half_a_hello", 20)


def saying_garbage(place, seed):
    """It says anything, again and again."""
    return _half_a_handshake(place, "say_garbage", seed)


@contextlib.contextmanager
def offer_out(place):
    """It has offered a large tensor that is not fetched yet."""
    with _open(Pipe.listen(place.near)) as receiver, _child(place, "send_for_ever", receiver.address) as child:
        receiver.recv_tensor(timeout=60)
        out = np.empty(LARGE, np.uint8)
        yield Situation(child, lambda timeout: receiver.recv_tensor(out=out, timeout=timeout))


@contextlib.contextmanager
def sending(place):
    """It sends one large tensor after the other, and the survivor receives them."""
    with _open(Pipe.listen(place.near)) as receiver, _child(place, "send_for_ever", receiver.address) as child:
        out = np.empty(LARGE, np.uint8)
        receiver.recv_tensor(out=out, timeout=60)
        yield Situation(child, lambda timeout: receiver.recv_tensor(out=out, timeout=timeout))


@contextlib.contextmanager
def before_the_acknowledgement(place):
    """It has been offered a tensor that it does not take."""
    tensor = np.ones(LARGE, np.uint8)
    with _serving(place, "receive_nothing") as (child, address, _), _open(Pipe.connect(address)) as sender:
        yield Situation(child, lambda timeout: sender.send_tensor(tensor, timeout=timeout))


@contextlib.contextmanager
def receiving(place):
    """It receives one large tensor after the other."""
    tensor = np.ones(LARGE, np.uint8)

    def reach():
        try:
            sender.send_tensor(tensor, timeout=5)  # a pipe outlives a stop of less than `silence_s`
        except PeerLostError:
            with _open(Pipe.connect(address, timeout=1)) as again:
                again.send_tensor(tensor, timeout=5)

    with _serving(place, "receive_for_ever") as (child, address, start), _open(Pipe.connect(address)) as sender:
        sender.send_tensor(tensor, timeout=60)
        server = Server(address, start, reach)
        yield Situation(child, lambda timeout: sender.send_tensor(tensor, timeout=timeout), server)


@contextlib.contextmanager
def _blocks(place, program, operate):
    memory = np.zeros((NUM_BLOCKS, BLOCK_BYTES), np.uint8)
    ids = range(NUM_BLOCKS)

    def plan(timeout):
        peer = agent.connect(address, timeout=timeout)
        return peer.prepare(region, ids, "kv", ids)

    with _serving(place, program, NUM_BLOCKS, BLOCK_BYTES) as (child, address, start), Agent(place.near) as agent:
        region = agent.register(memory, "own", BLOCK_BYTES)
        first = plan(10)
        operate(first)(timeout=60).wait()
        server = Server(address, start, lambda: operate(plan(1))(timeout=5).wait())
        yield Situation(child, lambda timeout: operate(first)(timeout=timeout).wait(), server)


def serving_blocks(place):
    """Its blocks are being read."""
    return _blocks(place, "serve_blocks", lambda plan: plan.read)


def taking_blocks(place):
    """Its blocks are being written."""
    return _blocks(place, "serve_blocks", lambda plan: plan.write)


@contextlib.contextmanager
def serving_entries(place):
    """Entries are inserted into its lookup buffer and taken out."""
    tensor = np.ones(ENTRY_BYTES, np.uint8)

    def pass_through(buffer, timeout):
        buffer.insert(np.array([1]), None, tensor, None, None, timeout=timeout)
        buffer.drop_select(None, None, timeout=timeout)

    def reach():
        with LookupBuffer.connect(address, timeout=1) as again:
            pass_through(again, 5)

    with (
        _serving(place, "serve_entries", 4 * ENTRY_BYTES) as (child, address, start),
        LookupBuffer.connect(address) as client,
    ):
        pass_through(client, 60)
        yield Situation(child, lambda timeout: pass_through(client, timeout), Server(address, start, reach))


# Those whose failure is nothing to the survivor, who serves others as before.
HARMLESS = (before_the_hello, mid_handshake)
FATAL = (
    offer_out,
    sending,
    before_the_acknowledgement,
    receiving,
    serving_blocks,
    taking_blocks,
    serving_entries,
)
SERVERS = (receiving, serving_blocks, serving_entries)
