"""Handoffs between two workers' agents on GPUs of the stand-in; in the second, one call of the driver fails once.

    python -m tests.fake_cuda.handoff LIBRARY INTEGRITY LAST [CALL]

The producer's stream writes the blocks late, and an earlier step of the consumer clears its blocks late. `source` or
`target` is done last; of `host-source` or `host-target` that side has no GPU. With `too-early` the producer announces
without an event, before its stream has written, and the consumer loads after that. It prints `right` or `error: …` for
each of three handoffs, and whether the call was made in the second or third.
"""

import sys
import time

import numpy as np

from kvpipe import KVPipeError, _kvpipe
from kvpipe._transport import transport
from kvpipe.testing import memory_transport
from tests.fake_cuda.driver import FakeDriver, FakeMemory
from tests.fake_cuda.scenario import BLOCK, NUM_BLOCKS, TIMEOUT_S, bytes_of, content

BLOCKS = list(range(NUM_BLOCKS))
PAUSE_S = 0.03


class Worker:
    """An agent with one region, on a GPU or without one in host memory."""

    def __init__(self, driver: FakeDriver, device: int | None, integrity: str) -> None:
        self.driver, self.device = driver, device
        self.agent = _kvpipe.Agent("127.0.0.1:0", b"", transport(), integrity=integrity)
        self.memory: FakeMemory | np.ndarray
        if device is None:
            described = self.memory = np.zeros(BLOCK * NUM_BLOCKS, np.uint8)
        else:
            self.memory = driver.memory(BLOCK * NUM_BLOCKS, device=device, stream=driver.stream())
            described = _kvpipe.CudaMemory(self.memory.address, BLOCK * NUM_BLOCKS, device, self.memory)
        registered = self.agent.register("kv", described, BLOCK, BLOCK)
        registered.wait(TIMEOUT_S)
        self.region = registered.result()

    def hold(self, written: bytes) -> int:
        """Launches a write of all blocks, and returns the number that releases it. A CPU writes them at once."""
        if isinstance(self.memory, np.ndarray):
            self.memory[:] = np.frombuffer(written, np.uint8)
            return 0
        held = self.driver.hold(self.memory.stream)
        self.driver.write(self.memory, written)
        return held

    def record(self) -> _kvpipe.CudaEvent | None:
        if isinstance(self.memory, np.ndarray):
            return None
        return _kvpipe.CudaEvent.record(self.device, self.memory.stream)


def until_written(worker: Worker, written: bytes) -> None:
    """Waits until the worker's stream has written its blocks."""
    deadline = time.monotonic() + TIMEOUT_S
    while bytes_of(worker.memory) != written and time.monotonic() < deadline:
        time.sleep(0.001)


def hand_over(producer: Worker, consumer: Worker, last: str, seed: int) -> FakeMemory | np.ndarray:
    """Loads the producer's blocks. What does not wait for the stream that is done last has time to go wrong."""
    handoff, held, events = bytes([seed]) * 16, [], {}
    late = [(producer, content(seed)), (consumer, bytes(BLOCK * NUM_BLOCKS))]
    try:
        for worker, written in late[::-1] if last == "source" else late:
            held.append(worker.hold(written))
            events[worker] = worker.record()
        ready = _kvpipe.ReadyBlocks([(handoff, 0, BLOCKS)])
        is_too_early = last == "too-early"
        producer.agent.mark_ready(ready, [producer.region], None if is_too_early else events[producer])
        if is_too_early:
            time.sleep(PAUSE_S)
            producer.driver.release(held.pop(0))
            until_written(producer, content(seed))
        address, incarnation = str(producer.agent.address), bytes(producer.agent.incarnation)
        parts = [([consumer.region], 0, BLOCKS)]
        consumer.agent.load(handoff, address, incarnation, parts, True, events[consumer])  # noqa: FBT003
    finally:
        for number in held:
            time.sleep(PAUSE_S)
            producer.driver.release(number)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for event_ in consumer.agent.drain():
            if event_["event"] == "load_completed":
                return consumer.memory
            if event_["event"] == "load_failed":
                assert len(event_["missing"]) == NUM_BLOCKS
                raise KVPipeError(event_["reason"])
        time.sleep(0.002)
    raise KVPipeError("Timeout")


def outcome(producer: Worker, consumer: Worker, last: str, seed: int) -> str:
    try:
        found = hand_over(producer, consumer, last, seed)
    except KVPipeError as error:
        return f"error: {error}"
    return "right" if bytes_of(found) == content(seed) else "wrong bytes"


def main() -> None:
    library, integrity, last, *calls = sys.argv[1:]
    driver = FakeDriver(library)
    with memory_transport():
        workers = (
            Worker(driver, None if last == "host-source" else 0, integrity),
            Worker(driver, None if last == "host-target" else 1, integrity),
        )
        print(outcome(*workers, last, 1))
        before = [driver.num_calls(call) for call in calls]
        for call in calls:
            driver.fail(call)
        print(outcome(*workers, last, 2))
        for call in calls:
            driver.fail(call, times=0)
        print(outcome(*workers, last, 3))
        for worker in workers:
            worker.agent.close()
        print(*(driver.num_calls(call) > count for call, count in zip(calls, before, strict=True)))


if __name__ == "__main__":
    main()
