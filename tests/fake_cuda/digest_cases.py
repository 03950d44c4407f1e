"""Cases of handoffs between GPUs of the stand-in with integrity=checksum whose kernels are held, or are refused.

    python -m tests.fake_cuda.digest_cases LIBRARY CASE

It prints a line for each thing that a test looks for.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.bench_read import OF_A_READ
from bench.trace import read
from kvpipe import KVPipeError, _kvpipe
from kvpipe.testing import memory_transport
from tests.fake_cuda.driver import FakeDriver, FakeMemory
from tests.fake_cuda.injected_faults import TIMEOUT_S, HostMemory, Worker

HANDOFF = b"\7" * 16
# Blocks of a launch, at most.
CAP = 8192
# Longer than any other step of a read takes.
HELD_S = 0.5


def until(is_so: Callable[[], bool]) -> bool:
    """Waits until something is so; false if it does not become so."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def events_of(worker: Worker, num_loads: int) -> list[dict[str, Any]]:
    """The ends of loads."""
    found: list[dict[str, Any]] = []

    def all_ended() -> bool:
        found.extend(event for event in worker.agent.drain() if event["event"] in ("load_completed", "load_failed"))
        return len(found) >= num_loads

    until(all_ended)
    return found


def ends_of(worker: Worker, num_loads: int) -> list[str]:
    """How loads have ended."""
    return [event["event"] for event in events_of(worker, num_loads)]


class Pair:
    """A producer, on a GPU or without one, and a consumer on a GPU."""

    source: FakeMemory | HostMemory

    def __init__(self, driver: FakeDriver, num_blocks: int, block: int, *, has_gpu: bool = True) -> None:
        self.driver = driver
        self.source = driver.memory(num_blocks * block) if has_gpu else HostMemory(num_blocks * block)
        self.target = driver.memory(num_blocks * block, device=1)
        self.source.put(random.Random(46).randbytes(num_blocks * block))
        self.producer, self.consumer = Worker(self.source, 0, block), Worker(self.target, 1, block)

    def until_launched(self, num_launches: int) -> None:
        assert until(lambda: self.driver.num_calls("cuLaunchKernel") >= num_launches)

    def hold(self) -> None:
        self.driver.hold_kernels(is_held=True)

    def hold_a_copy(self) -> None:
        """Begins a load of two blocks, whose copy is held."""
        self.producer.ready(HANDOFF, [0, 1])
        self.until_launched(1)
        # The producer's kernel has begun then.
        time.sleep(0.1)
        self.hold()
        self.consumer.load(self.producer, HANDOFF, [2, 3], None)
        self.until_launched(2)

    def release(self) -> None:
        self.driver.hold_kernels(is_held=False)
        self.driver.release(self.driver.last_hold())


def refused(driver: FakeDriver) -> None:
    """More batches than launches run at once, of which several in a row are refused. No kernel copies them."""
    pair = Pair(driver, num_blocks=40, block=512, has_gpu=False)
    handoffs = [bytes([number]) * 16 for number in range(14)]
    for number, handoff in enumerate(handoffs):
        pair.producer.ready(handoff, [2 * number, 2 * number + 1])
    pair.consumer.load(pair.producer, HANDOFF[:15] + b"\0", [38], None)
    time.sleep(0.1)
    pair.hold()
    num_before = driver.num_calls("cuLaunchKernel")
    for number, handoff in enumerate(handoffs):
        pair.consumer.load(pair.producer, handoff, [2 * number, 2 * number + 1], None)
    pair.until_launched(num_before + 4)
    time.sleep(0.1)
    driver.fail("cuLaunchKernel", times=9)
    pair.release()
    print(len(ends_of(pair.consumer, len(handoffs))))
    driver.fail("cuLaunchKernel", times=0)
    pair.producer.ready(HANDOFF, [30])
    pair.consumer.load(pair.producer, HANDOFF, [30], None)
    print(*ends_of(pair.consumer, 1))


def chunks(driver: FakeDriver) -> None:
    """Blocks of several chunks, of which the last one is shorter or is not, come in an order of their own."""
    for block in (40_960, 32_768, 512):
        pair = Pair(driver, num_blocks=8, block=block)
        here, there = [6, 1, 2, 3, 0], [0, 1, 2, 3, 7]
        handoff = block.to_bytes(16, "little")
        pair.producer.ready(handoff, there)
        pair.consumer.load(pair.producer, handoff, here, None)
        print(*ends_of(pair.consumer, 1))
        source, target = pair.source.content(), pair.target.content()
        pairs = zip(here, there, strict=True)
        print(all(target[block * to :][:block] == source[block * at :][:block] for to, at in pairs))
    print(driver.num_calls("cuLaunchKernel"))


def divided(driver: FakeDriver) -> None:
    """A consumer of halves asks for a division while the digests of as many blocks as one launch has are computed."""
    pair = Pair(driver, num_blocks=CAP, block=16)
    half = Worker(driver.memory(CAP * 8, device=1), 1, 8)
    pair.hold()
    pair.producer.ready(HANDOFF, list(range(CAP)))
    pair.until_launched(1)
    pair.consumer.load(pair.producer, HANDOFF, list(range(CAP)), None)
    half.load(pair.producer, HANDOFF, list(range(CAP)), 1)
    time.sleep(0.2)
    pair.release()
    print(*ends_of(pair.consumer, 1), *ends_of(half, 1))
    content = pair.source.content()
    print(pair.target.content() == content)
    print(half.memory.content() == b"".join(content[at + 8 : at + 16] for at in range(0, len(content), 16)))


def closed(driver: FakeDriver) -> None:
    """A region is closed while its digests are computed."""
    pair = Pair(driver, num_blocks=4, block=512)
    pair.hold()
    pair.producer.ready(HANDOFF, [0, 1])
    pair.until_launched(1)
    work = pair.producer.agent.close_region(pair.producer.region, TIMEOUT_S)
    time.sleep(0.1)
    print(work.is_completed())
    pair.release()
    work.wait(TIMEOUT_S)
    print(work.is_completed())


def closed_there(driver: FakeDriver) -> None:
    """The consumer closes its region while the first copy of blocks with digests runs."""
    pair = Pair(driver, num_blocks=4, block=40_960)
    pair.hold_a_copy()
    work = pair.consumer.agent.close_region(pair.consumer.region, TIMEOUT_S)
    time.sleep(0.1)
    print(work.is_completed())
    pair.release()
    print(*(f"corrupt: {event['num_corrupt']}" for event in events_of(pair.consumer, 1)))
    work.wait(TIMEOUT_S)
    print(work.is_completed())


def stuck(driver: FakeDriver) -> None:
    """The consumer's agent is closed while a copy does not end."""
    pair = Pair(driver, num_blocks=4, block=512)
    pair.hold_a_copy()
    pair.consumer.agent.close()
    print("closed")
    pair.release()
    pair.producer.agent.close()


def traced(driver: FakeDriver) -> None:
    """A copy is held."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        pair = Pair(driver, num_blocks=4, block=512)
        pair.consumer.agent.trace_to(_kvpipe.Trace(str(file), "consumer"))
        pair.hold_a_copy()
        time.sleep(HELD_S)
        pair.release()
        ends_of(pair.consumer, 1)
        pair.consumer.agent.close()
        assert until(lambda: '"loaded"' in file.read_text())
        of_read = sorted((event for event in read(file) if event.name in OF_A_READ), key=lambda event: event.began_s)
        print(*(event.name for event in of_read))
        print(max(of_read, key=lambda event: event.ended_s - event.began_s).name)


def not_loaded(driver: FakeDriver) -> None:
    """The kernel does not load."""
    driver.fail("kvpipe_digest_blocks")
    for _ in range(2):
        try:
            Worker(driver.memory(512), 0, 512)
        except KVPipeError as error:
            print(type(error).__name__, error)


def main() -> None:
    library, case = sys.argv[1:]
    with memory_transport():
        cases = [refused, chunks, divided, closed, closed_there, stuck, traced, not_loaded]
        {function.__name__: function for function in cases}[case](FakeDriver(library))


if __name__ == "__main__":
    main()
