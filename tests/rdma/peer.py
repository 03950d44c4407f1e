"""Programs that `tests.rdma` runs as other processes, as `tests.peers` does; they listen where the RDMA device is."""

import contextlib
import os
import sys

import numpy as np

from kvpipe import Agent, EndOfPipeError, Pipe
from tests.peers import pattern, say, wait_for_the_end

LISTEN = f"{os.environ.get('KVPIPE_TEST_LOCAL')}:0"


def echo():
    """Sends back whatever it receives, to the address that it is told."""
    receiver = Pipe.listen(LISTEN)
    say(receiver.address)
    sender = Pipe.connect(sys.stdin.readline().strip(), timeout=60)
    with contextlib.suppress(EndOfPipeError):
        while True:
            sender.send_tensor(receiver.recv_tensor())
    sender.close()
    receiver.close()


def send_for_ever(address, num_bytes):
    sender = Pipe.connect(address, timeout=60)
    tensor = np.ones(int(num_bytes), np.uint8)
    while True:
        sender.send_tensor(tensor)


def receive_for_ever(num_bytes):
    receiver = Pipe.listen(LISTEN)
    say(receiver.address)
    out = np.empty(int(num_bytes), np.uint8)
    while True:
        receiver.recv_tensor(out=out)


def expose_blocks(num_blocks, block_bytes):
    """An agent whose region `kv` may be read and written."""
    with Agent(LISTEN) as agent:
        agent.register(pattern(int(num_blocks), int(block_bytes)), "kv", int(block_bytes), writable=True)
        say(agent.address)
        wait_for_the_end()


def exchange_blocks(address, num_blocks, block_bytes):
    """Reads half of a peer's blocks and writes the others, at once, again and again; says each time what carried it.

    All of it is on one session: a lost one is an error.
    """
    theirs = pattern(int(num_blocks), int(block_bytes))
    ours, arrived, ids = theirs + 1, np.zeros_like(theirs), range(int(num_blocks))
    read, written = ids[::2], ids[1::2]
    with Agent(LISTEN) as agent:
        peer = agent.connect(address, timeout=60)
        source, destination = (
            agent.register(memory, name, int(block_bytes)) for memory, name in ((ours, "ours"), (arrived, "arrived"))
        )
        while True:
            arrived[:] = 0
            works = (
                peer.read_blocks(destination, read, "kv", read),
                peer.write_blocks(source, written, "kv", written),
            )
            for work in works:
                work.wait(60)
            peer.read_blocks(destination, written, "kv", written).wait(60)
            assert np.array_equal(arrived[read], theirs[read])
            assert np.array_equal(arrived[written], ours[written])
            say(peer.transport)


PROGRAMS = {
    program.__name__: program for program in (echo, exchange_blocks, expose_blocks, receive_for_ever, send_for_ever)
}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
