"""A KV cache that stores what it was computed from."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.vllm.handoff.engine import BLOCK

NUM_BLOCKS = 13  # block 0 is vLLM's null block


@dataclass
class Cache:
    """Each slot holds a number that stands for all tokens up to its own; None is garbage."""

    slots: list[list[int | None]] = field(default_factory=lambda: [[None] * BLOCK for _ in range(NUM_BLOCKS)])
    _names: dict[tuple[int | None, int], int] = field(default_factory=dict)
    _histories: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def history(self, tokens: list[int]) -> list[int]:
        """The number of each position of a sequence. Not to be changed: who asks again gets the same list."""
        sequence = tuple(tokens)
        if (known := self._histories.get(sequence)) is not None:
            return known
        names: list[int] = []
        for token in tokens:
            key = (names[-1] if names else None, token)
            names.append(self._names.setdefault(key, len(self._names)))
        self._histories[sequence] = names
        return names

    def write(self, table: list[int], history: list[int], first: int, end: int) -> None:
        for position in range(first, end):
            self.slots[table[position // BLOCK]][position % BLOCK] = history[position]

    def holds(self, table: list[int], history: list[int], first: int, end: int) -> bool:
        for start in range(first - first % BLOCK, end, BLOCK):
            begin, stop = max(first - start, 0), min(end - start, BLOCK)
            if self.slots[table[start // BLOCK]][begin:stop] != history[start + begin : start + stop]:
                return False
        return True

    def spoil(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.slots[block_id] = [None] * BLOCK
