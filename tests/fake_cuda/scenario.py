"""Moves bytes between memories of the stand-in's GPUs while one call of the driver fails once.

    python -m tests.fake_cuda.scenario LIBRARY OPERATION [CALL]

It prints `right` or `error: …`, then the same for a second time in which nothing fails.
"""

import sys
import time
from typing import Any

import numpy as np

from kvpipe import Agent, KVPipeError, Pipe, Work
from kvpipe.testing import memory_transport
from tests.fake_cuda.driver import FakeDriver, FakeMemory

TIMEOUT_S = 10.0
BLOCK, NUM_BLOCKS = 4096, 8
# More than the credit of a stream and all page-locked memory of a direction, and no multiple of a chunk.
LARGE = (6 << 20) + 12_345


def content(seed: int, num_bytes: int = BLOCK * NUM_BLOCKS) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def bytes_of(memory: FakeMemory | np.ndarray) -> bytes:
    return memory.content() if isinstance(memory, FakeMemory) else memory.tobytes()


def end(*works: Work[Any]) -> None:
    """Waits for both ends of a transfer. Either may fail first, and the other one then has nothing to wait for."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while not all(work.is_completed() for work in works) and time.monotonic() < give_up_at:
        for work in works:
            if work.is_completed():
                work.result()
        time.sleep(0.001)
    for work in works:
        work.wait(0)


class Scenario:
    """Memories on two GPUs. Each source is written late, by a stream that is held when the operation begins."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver = driver
        self.source, self.target = driver.memory(BLOCK * NUM_BLOCKS), driver.memory(BLOCK * NUM_BLOCKS, device=1)

    def late(self, seed: int) -> int:
        """Launches the writes of the source; the number by which they are released."""
        held = self.driver.hold(self.source.stream)
        self.driver.write(self.source, content(seed))
        return held

    def clear(self) -> None:
        self.driver.write(self.target, bytes(BLOCK * NUM_BLOCKS))

    def send(self, seed: int) -> FakeMemory:
        """Sends the source through a pipe into the target."""
        self.clear()
        with Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender:
            held = self.late(seed)
            try:
                sent = sender.isend_tensor(self.source, timeout=TIMEOUT_S)
                received = receiver.irecv_tensor(out=self.target, timeout=TIMEOUT_S)
            finally:
                self.driver.release(held)
            end(sent, received)
        return self.target

    def move(self, seed: int, num_bytes: int, *, from_gpu: bool, to_gpu: bool) -> FakeMemory | np.ndarray:
        """Sends a tensor between a GPU and the host, or two GPUs."""
        source: FakeMemory | np.ndarray = np.frombuffer(content(seed, num_bytes), np.uint8).copy()
        if from_gpu:
            source = self.driver.memory(num_bytes)
            self.driver.write(source, content(seed, num_bytes))
        target = self.driver.memory(num_bytes, device=1) if to_gpu else np.zeros(num_bytes, np.uint8)
        with Pipe.listen() as receiver, Pipe.connect(receiver.address) as sender:
            sent = sender.isend_tensor(source, timeout=TIMEOUT_S)
            received = receiver.irecv_tensor(out=target, timeout=TIMEOUT_S)
            end(sent, received)
        return target

    def to_host(self, seed: int) -> FakeMemory | np.ndarray:
        return self.move(seed, BLOCK * NUM_BLOCKS, from_gpu=True, to_gpu=False)

    def from_host(self, seed: int) -> FakeMemory | np.ndarray:
        return self.move(seed, BLOCK * NUM_BLOCKS, from_gpu=False, to_gpu=True)

    def large(self, seed: int) -> FakeMemory | np.ndarray:
        return self.move(seed, LARGE, from_gpu=True, to_gpu=True)

    def large_to_host(self, seed: int) -> FakeMemory | np.ndarray:
        return self.move(seed, LARGE, from_gpu=True, to_gpu=False)

    def large_from_host(self, seed: int) -> FakeMemory | np.ndarray:
        return self.move(seed, LARGE, from_gpu=False, to_gpu=True)

    def read(self, seed: int) -> FakeMemory:
        """Reads the blocks of the source by an agent. The target is cleared late: a read before that would be lost."""
        self.driver.release(self.late(seed))
        with Agent() as owner, Agent() as reader:
            owner.register(self.source, "kv", BLOCK)
            own = reader.register(self.target, "own", BLOCK, writable=True)
            peer = reader.connect(owner.address, timeout=TIMEOUT_S)
            held, blocks = self.driver.hold(self.target.stream), list(range(NUM_BLOCKS))
            self.clear()
            try:
                read = peer.read_blocks(own, blocks, "kv", blocks)
            finally:
                self.driver.release(held)
            read.wait(TIMEOUT_S)
        return self.target


def outcome(scenario: Scenario, operation: str, seed: int) -> str:
    try:
        found = getattr(scenario, operation)(seed)
    except KVPipeError as error:
        return f"error: {type(error).__name__}: {error}"
    found_bytes = bytes_of(found)
    return "right" if found_bytes == content(seed, len(found_bytes)) else "wrong bytes"


def main() -> None:
    library, operation, *calls = sys.argv[1:]
    driver = FakeDriver(library)
    with memory_transport():
        for call in calls:
            driver.fail(call)
        scenario = Scenario(driver)
        print(outcome(scenario, operation, 1))
        for call in calls:
            driver.fail(call, times=0)
        print(outcome(scenario, operation, 2))
        print(driver.num_current())
        print(*(driver.num_calls(call) for call in calls))


if __name__ == "__main__":
    main()
