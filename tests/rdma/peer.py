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


PROGRAMS = {program.__name__: program for program in (echo, expose_blocks, receive_for_ever, send_for_ever)}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
