"""Loads from a GPU of the stand-in with integrity=checksum, while blocks change behind P's back, or copies go wrong.

    python -m tests.fake_cuda.injected_faults LIBRARY COUNT SEED [KERNEL]    KERNEL does not load
    python -m tests.fake_cuda.injected_faults cuda:0 COUNT SEED    on a GPU, where no copies go wrong

Each fault is made after the blocks were announced, and before a consumer reads them: whole blocks, or one half of each,
as ranks of another tensor-parallel size do. It prints a line of JSON with the number of faults of each kind, and how
their loads ended.
"""

import json
import random
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

from kvpipe import _kvpipe
from kvpipe._transport import transport
from kvpipe.testing import memory_transport
from tests.fake_cuda.driver import FakeDriver, FakeMemory

BLOCK, NUM_BLOCKS = 2048, 6
HALF = BLOCK // 2
BLOCKS = list(range(NUM_BLOCKS))
TIMEOUT_S = 20.0
AT_SOURCE = ("flip", "swap", "stale", "shift")
AT_COPIES = ("lost copy", "flipped copy")


class TorchMemory:
    """Bytes on a GPU."""

    def __init__(self, num_bytes: int, device: str) -> None:
        import torch  # noqa: PLC0415 - only where there is a GPU

        self._torch: Any = torch
        self._bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.address = self._bytes.data_ptr()

    def put(self, content: bytes) -> None:
        """Has other bytes when this returns."""
        self._bytes.copy_(self._torch.frombuffer(bytearray(content), dtype=self._torch.uint8))
        self._torch.cuda.synchronize()

    def content(self) -> bytes:
        return bytes(self._bytes.cpu().numpy().tobytes())


class HostMemory:
    """Bytes of the host."""

    def __init__(self, num_bytes: int) -> None:
        self.array = np.zeros(num_bytes, np.uint8)

    def put(self, content: bytes) -> None:
        self.array[:] = np.frombuffer(content, np.uint8)

    def content(self) -> bytes:
        return self.array.tobytes()


class Gpu:
    """A GPU in place of the stand-in."""

    devices = 0, 0

    def __init__(self, device: str) -> None:
        self._device = device

    def memory(self, num_bytes: int, device: int = 0) -> TorchMemory:
        return TorchMemory(num_bytes, self._device)


class Worker:
    """An agent with one region, on a GPU or of the host."""

    def __init__(self, memory: FakeMemory | TorchMemory | HostMemory, device: int, block: int) -> None:
        self.block, self.memory = block, memory
        self.agent = _kvpipe.Agent("127.0.0.1:0", b"", transport(), integrity="checksum")
        described: Any
        if isinstance(memory, HostMemory):
            described = memory.array
        else:
            described = _kvpipe.CudaMemory(memory.address, len(memory.content()), device, memory)
        registered = self.agent.register("kv", described, block, block)
        registered.wait(TIMEOUT_S)
        self.region = registered.result()

    def ready(self, handoff: bytes, blocks: list[int]) -> None:
        """Producer: blocks are ready."""
        self.agent.mark_ready(_kvpipe.ReadyBlocks([(handoff, 0, blocks)]), [self.region])

    def load(self, producer: "Worker", handoff: bytes, blocks: list[int], half: int | None) -> None:
        """Consumer: begins to load whole blocks, or the half of each with this index."""
        address, incarnation = str(producer.agent.address), bytes(producer.agent.incarnation)
        parts, source_slice = [([self.region], 0, blocks)], None if half is None else (half, 2)
        # Other loads of the handoff follow.
        options = {"source_slice": source_slice, "is_shared": True}
        self.agent.load(handoff, address, incarnation, parts, True, **options)  # noqa: FBT003


class Consumer(Worker):
    """It loads whole blocks, or the half of each with this index."""

    def __init__(self, driver: FakeDriver | Gpu, half: int | None) -> None:
        block = BLOCK if half is None else HALF
        super().__init__(driver.memory(block * NUM_BLOCKS, device=driver.devices[1]), driver.devices[1], block)
        self.half = half

    def load_all(self, producer: Worker, handoff: bytes) -> dict[str, Any]:
        """Loads all blocks; the event of its end."""
        self.memory.put(b"\xa5" * (self.block * NUM_BLOCKS))
        self.load(producer, handoff, BLOCKS, self.half)
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            for event in self.agent.drain():
                if event["event"] in ("load_completed", "load_failed"):
                    return event
            time.sleep(0.0002)
        raise TimeoutError

    def part_of(self, content: np.ndarray) -> bytes:
        """Its part of the producer's blocks."""
        if self.half is None:
            return content.tobytes()
        return content[:, HALF * self.half : HALF * (self.half + 1)].tobytes()


def at_source(kind: str, content: np.ndarray, before: np.ndarray, rng: random.Random) -> np.ndarray:
    """The blocks after a fault."""
    wrong, block = content.copy(), rng.randrange(NUM_BLOCKS)
    if kind == "flip":
        wrong[block, rng.randrange(BLOCK)] ^= 1 << rng.randrange(8)
    elif kind == "swap":
        other = (block + 1 + rng.randrange(NUM_BLOCKS - 1)) % NUM_BLOCKS
        wrong[[block, other]] = content[[other, block]]
    elif kind == "stale":
        wrong[block] = before[block]
    else:
        wrong[block] = np.roll(content[block], 16)
    return wrong


class Trial:
    """A handoff of which each consumer has loaded all, and loads again with faults."""

    def __init__(self, driver: FakeDriver | Gpu, rng: random.Random) -> None:
        self.driver, self.rng = driver, rng
        self.producer = Worker(driver.memory(BLOCK * NUM_BLOCKS), 0, BLOCK)
        self.consumers = [Consumer(driver, half) for half in (None, 0, 1)]
        self.content = self.before = np.zeros((NUM_BLOCKS, BLOCK), np.uint8)
        self.handoff = bytes(16)

    def next_handoff(self) -> None:
        """Ends the handoff, and makes new blocks ready, whose digests are known when this returns."""
        self.producer.agent.end(self.handoff, "over")
        self.before, self.handoff = self.content, self.rng.randbytes(16)
        self.content = np.frombuffer(self.rng.randbytes(BLOCK * NUM_BLOCKS), np.uint8).reshape(NUM_BLOCKS, BLOCK).copy()
        # As the end of a prompt leaves them. Their digest is 0.
        self.content[self.rng.randrange(3)] = 0
        self.producer.memory.put(self.content.tobytes())
        self.producer.ready(self.handoff, BLOCKS)
        for consumer in self.consumers:
            assert self.outcome(consumer) == "right"

    def outcome(self, consumer: Consumer) -> str:
        """How a load ended: `right`, `corrupt` or what must not be."""
        event = consumer.load_all(self.producer, self.handoff)
        assert event["num_compared"] >= NUM_BLOCKS
        if event["event"] == "load_failed":
            assert event["missing"], event
            return "corrupt" if event["num_corrupt"] > 0 else event["reason"]
        if consumer.memory.content() != consumer.part_of(self.content):
            return "WRONG BYTES"
        return "found, read again" if event["num_corrupt"] > 0 else "right"

    def fault(self, kind: str) -> tuple[str, str]:
        """Makes a fault; how the load with it ended, and how it should have."""
        consumer = self.rng.choice(self.consumers)
        if isinstance(self.driver, FakeDriver) and kind in AT_COPIES:
            go_wrong = self.driver.lose_copies if kind == "lost copy" else self.driver.flip_copies
            go_wrong(1)
            return self.outcome(consumer), "found, read again"
        wrong = at_source(kind, self.content, self.before, self.rng)
        self.producer.memory.put(wrong.tobytes())
        outcome = self.outcome(consumer)
        self.producer.memory.put(self.content.tobytes())
        is_hit = consumer.part_of(wrong) != consumer.part_of(self.content)
        return outcome, "corrupt" if is_hit else "right"


def main() -> None:
    place, count, seed, kernels = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]
    driver = Gpu(place) if place.startswith("cuda:") else FakeDriver(place)
    if isinstance(driver, FakeDriver):
        for kernel in kernels:
            driver.fail(kernel, times=9)
    kinds, rng = AT_SOURCE if isinstance(driver, Gpu) else AT_SOURCE + AT_COPIES, random.Random(seed)
    outcomes: Counter[str] = Counter()
    with memory_transport():
        trial = Trial(driver, rng)
        for number in range(count):
            if number % 10 == 0:
                trial.next_handoff()
            kind = rng.choice(kinds)
            outcome, expected = trial.fault(kind)
            outcomes[f"{kind}: {outcome}" if outcome == expected else f"{kind}: {outcome}, NOT {expected}"] += 1
    launches = driver.num_calls("cuLaunchKernel") if isinstance(driver, FakeDriver) else None
    print(json.dumps({"launches": launches, "outcomes": outcomes}))


if __name__ == "__main__":
    main()
