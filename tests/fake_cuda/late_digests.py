"""Handoffs between GPUs of the stand-in with integrity=checksum, whose kernels run late, in a random order of events.

    python -m tests.fake_cuda.late_digests LIBRARY COUNT SEED [KERNEL]    KERNEL does not load

A producer makes blocks ready, ends handoffs and then writes other bytes into their blocks. Consumers load and cancel.
Kernels are held and released meanwhile. It prints a line of JSON with the numbers of loads by their ends.
"""

import json
import random
import sys
import time
from collections import Counter

from kvpipe import KVPipeError
from kvpipe.testing import memory_transport
from tests.fake_cuda.driver import FakeDriver, FakeMemory
from tests.fake_cuda.injected_faults import Worker

BLOCK, NUM_BLOCKS = 2048, 24
PER_HANDOFF = 2
TIMEOUT_S = 20.0
HALVES = (None, 0, 1)


class Run:
    """Events in a random order, and what must be true of each load that ends."""

    def __init__(self, driver: FakeDriver, memories: list[FakeMemory], rng: random.Random) -> None:
        self.driver, self.rng, self.ends = driver, rng, Counter[str]()
        self.producer = Worker(memories[0], 0, BLOCK)
        self.consumers = {
            half: Worker(memory, 1, BLOCK if half is None else BLOCK // 2)
            for half, memory in zip(HALVES, memories[1:], strict=True)
        }
        # The blocks of each handoff that has not ended, and what they held when they were ready.
        self.open: dict[bytes, list[int]] = {}
        self.content: dict[bytes, list[bytes]] = {}
        self.loads: dict[tuple[int | None, bytes], list[int]] = {}

    def begin(self) -> None:
        """Blocks that are free get other bytes, and are ready."""
        used = {block for blocks in self.open.values() for block in blocks}
        free = [block for block in range(NUM_BLOCKS) if block not in used]
        if len(free) < PER_HANDOFF:
            return
        handoff, blocks = self.rng.randbytes(16), self.rng.sample(free, PER_HANDOFF)
        self.open[handoff], self.content[handoff] = blocks, [self.rng.randbytes(BLOCK) for _ in blocks]
        self.write(blocks, self.content[handoff])
        self.producer.ready(handoff, blocks)

    def write(self, blocks: list[int], content: list[bytes]) -> None:
        for block, written in zip(blocks, content, strict=True):
            self.producer.memory.put(written, at=BLOCK * block)

    def end(self) -> None:
        """A handoff ends, and its blocks are written at once."""
        if self.open:
            handoff = self.rng.choice(list(self.open))
            blocks = self.open.pop(handoff)
            self.producer.agent.end(handoff, "preempted")
            self.write(blocks, [self.rng.randbytes(BLOCK) for _ in blocks])

    def load(self) -> None:
        """A consumer loads a handoff, perhaps one that has ended."""
        half = self.rng.choice(HALVES)
        busy = {block for (of, _), blocks in self.loads.items() if of == half for block in blocks}
        free = [block for block in range(NUM_BLOCKS) if block not in busy]
        wanted = [handoff for handoff in list(self.content)[-14:] if (half, handoff) not in self.loads]
        if wanted and len(free) >= PER_HANDOFF:
            handoff, blocks = self.rng.choice(wanted), self.rng.sample(free, PER_HANDOFF)
            self.loads[half, handoff] = blocks
            self.consumers[half].load(self.producer, handoff, blocks, half)

    def cancel(self) -> None:
        if self.loads:
            half, handoff = self.rng.choice(list(self.loads))
            self.consumers[half].agent.cancel(handoff, "not wanted", self.rng.random() < 0.5)

    def hold(self) -> None:
        self.driver.hold_kernels(is_held=True)

    def release(self) -> None:
        self.driver.hold_kernels(is_held=False)
        self.driver.release(self.driver.last_hold())

    def refuse(self) -> None:
        """The next launches are refused."""
        self.driver.fail("cuLaunchKernel", times=self.rng.randrange(7))

    def pause(self) -> None:
        time.sleep(0.001)

    def drain(self) -> None:
        """Looks at the loads that have ended: a complete one has what was ready, wherever that is now."""
        for half, consumer in self.consumers.items():
            for event in consumer.agent.drain():
                if event["event"] not in ("load_completed", "load_failed"):
                    continue
                handoff = bytes(event["handoff"])
                blocks = self.loads.pop((half, handoff))
                size, content = consumer.block, consumer.memory.content()
                found = [content[size * block : size * (block + 1)] for block in blocks]
                begin = 0 if half is None else size * half
                right = [block[begin : begin + size] for block in self.content[handoff]]
                missing = event.get("missing", [])
                is_right = all(index in missing or found[index] == right[index] for index in range(PER_HANDOFF))
                self.ends[event["event"] if is_right else "WRONG BYTES"] += 1

    def finish(self) -> None:
        """Nothing is held any more, every handoff ends, and every load."""
        self.release()
        for handoff in list(self.open):
            self.producer.agent.end(handoff, "over")
        deadline = time.monotonic() + TIMEOUT_S
        while self.loads and time.monotonic() < deadline:
            self.drain()
            time.sleep(0.0005)
        self.ends["NO END"] += len(self.loads)
        for worker in (self.producer, *self.consumers.values()):
            # When no launch uses the region any more.
            closed = worker.agent.close_region(worker.region, TIMEOUT_S)
            try:
                closed.wait()
                closed.result()
            except KVPipeError:
                self.ends["REGION IN USE"] += 1


def main() -> None:
    library, count, seed, kernels = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    driver, rng = FakeDriver(library), random.Random(seed)
    for kernel in kernels:
        driver.fail(kernel, times=9)
    ends: Counter[str] = Counter()
    memories = [driver.memory(BLOCK * NUM_BLOCKS, device=int(index > 0)) for index in range(1 + len(HALVES))]
    with memory_transport():
        for _ in range(count):
            run = Run(driver, memories, rng)
            weights = {run.begin: 4, run.end: 1, run.load: 9, run.cancel: 1, run.pause: 12}
            weights |= {run.hold: 2, run.release: 3, run.refuse: 1}
            for step in rng.choices(list(weights), list(weights.values()), k=200):
                step()
                run.drain()
            is_finished = rng.random() < 0.8
            if is_finished:
                run.finish()
            # The others close while kernels run.
            for worker in (run.producer, *run.consumers.values()):
                if not is_finished:
                    run.release()
                worker.agent.close()
            ends += run.ends
    print(json.dumps({"ends": ends, "contexts": driver.num_current()}))


if __name__ == "__main__":
    main()
