"""Gathers blocks of a cache on a GPU of the stand-in into a chunk, and scatters them into another one.

    python -m tests.fake_cuda.cache_layers LIBRARY [CALL]

One call of the driver fails once in the second round of three. It prints `right` or `error: …` for each round, and
whether the call was made in the second.
"""

import sys
from typing import Any

import numpy as np

from kvpipe import KVPipeError, _kvpipe
from tests.fake_cuda.driver import FakeDriver

# A block of more than a page-locked chunk, one of less, and one that others lie between.
LAYERS = [(300_000, 300_000), (4096, 4096), (1000, 3000)]
NUM_BLOCKS = 9
FIRST_OUT = 2
BLOCK_IDS, TARGET_IDS = [7, 0, 3, 4, 8], [1, 5, 2]


class Cache:
    """A cache of some layers on a GPU."""

    def __init__(self, driver: FakeDriver, device: int) -> None:
        self.memories = [driver.memory(stride * NUM_BLOCKS, device=device) for _, stride in LAYERS]
        described = [
            (_kvpipe.CudaMemory(memory.address, stride * NUM_BLOCKS, device, memory), stride, block_bytes)
            for memory, (block_bytes, stride) in zip(self.memories, LAYERS, strict=True)
        ]
        self.layers = _kvpipe.CacheLayers(described)

    def fill(self, rng: np.random.Generator) -> None:
        for memory in self.memories:
            memory.put(rng.bytes(len(memory.content())))

    def block(self, layer: int, block_id: int) -> bytes:
        block_bytes, stride = LAYERS[layer]
        return self.memories[layer].content()[stride * block_id : stride * block_id + block_bytes]


def outcome(source: Cache, target: Cache, rng: np.random.Generator) -> str:
    """Moves blocks from one cache to the other, whose other bytes stay."""
    source.fill(rng)
    target.fill(rng)
    before = [memory.content() for memory in target.memories]
    chunk: Any = np.zeros(len(BLOCK_IDS) * sum(size for size, _ in LAYERS), np.uint8)
    try:
        source.layers.gather(BLOCK_IDS, chunk)
        wanted = b"".join(source.block(layer, id_) for layer in range(len(LAYERS)) for id_ in BLOCK_IDS)
        if chunk.tobytes() != wanted:
            return "wrong chunk"
        target.layers.scatter(chunk, TARGET_IDS, FIRST_OUT)
    except KVPipeError as error:
        return f"error: {error}"
    for layer, (block_bytes, stride) in enumerate(LAYERS):
        expected = bytearray(before[layer])
        for to, id_ in zip(TARGET_IDS, BLOCK_IDS[FIRST_OUT:], strict=True):
            expected[stride * to : stride * to + block_bytes] = source.block(layer, id_)
        if target.memories[layer].content() != expected:
            return "wrong cache"
    return "right"


def main() -> None:
    library, *calls = sys.argv[1:]
    driver, rng = FakeDriver(library), np.random.default_rng(46)
    source, target = Cache(driver, 0), Cache(driver, 1)
    print(outcome(source, target, rng))
    before = [driver.num_calls(call) for call in calls]
    for call in calls:
        driver.fail(call)
    print(outcome(source, target, rng))
    for call in calls:
        driver.fail(call, times=0)
    print(*(driver.num_calls(call) > count for call, count in zip(calls, before, strict=True)))
    print(outcome(source, target, rng))
    for block_ids in ([NUM_BLOCKS], [1 << 60]):
        try:
            source.layers.gather(block_ids, np.zeros(1 << 20, np.uint8))
        except ValueError as error:
            print("refused" if "is not in the cache" in str(error) else error)


if __name__ == "__main__":
    main()
