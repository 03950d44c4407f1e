"""A KV cache that stores what it was computed from, and what the layers of each KV cache group read of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.vllm.handoff.engine import BLOCK

NUM_BLOCKS = 13  # of one group; block 0 is vLLM's null block
NUM_MORE_BLOCKS = 12  # of each further group


@dataclass(frozen=True)
class Layers:
    """The layers of a KV cache group, said independently of the code under test.

    Attributes:
        kind: `full`, `window`, `chunk` or `state`.
        reach: Tokens of the window or chunk.
        block_size: Tokens of a block, for a state: that it stands for.
    """

    kind: str = "full"
    reach: int = 0
    block_size: int = BLOCK

    @property
    def is_state(self) -> bool:
        return self.kind == "state"

    def first_read(self, position: int) -> int:
        """The first token that the token at a position reads."""
        if self.kind == "window":
            return max(0, position - self.reach + 1)
        if self.kind == "chunk":
            return position // self.reach * self.reach
        return 0 if self.kind == "full" else max(0, position - 1)

    def block_of(self, position: int) -> int:
        """The place of a token's block in the table of a request."""
        return position // self.block_size


FULL = (Layers(),)

# What is stored of a token: a number for each KV head; None is garbage.
Slot = tuple[int | None, ...] | None


@dataclass
class Cache:
    """The cache of a rank, which has the KV of some heads.

    A number stands for one head and all tokens up to its own. A state is in the first slot of its block.
    """

    groups: tuple[Layers, ...] = FULL
    heads: tuple[int, ...] = (0,)
    slots: list[list[Slot]] = field(init=False)
    _names: dict[tuple[int, int], int] = field(default_factory=dict)
    _histories: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Slot]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [[None] * BLOCK for _ in range(num_blocks(self.groups))]

    def history(self, tokens: list[int], heads: tuple[int, ...] = ()) -> list[Slot]:
        """What is stored of each token of a sequence, of all heads of the rank or of these.

        Not to be changed: who asks again gets the same list.
        """
        key = tuple(tokens), heads or self.heads
        if (known := self._histories.get(key)) is not None:
            return known
        history = list(zip(*(self._numbers(tokens, head) for head in key[1]), strict=True))
        self._histories[key] = history
        return history

    def _numbers(self, tokens: list[int], head: int) -> list[int]:
        numbers = [~head]
        for token in tokens:
            numbers.append(self._names.setdefault((numbers[-1], token), len(self._names)))
        return numbers[1:]

    def write(self, layers: Layers, table: list[int], history: list[Slot], first: int, end: int) -> None:
        """Stores tokens, in blocks that are there; of a state the last one."""
        if layers.is_state:
            self.slots[table[layers.block_of(end - 1)]][0] = history[end - 1]
            return
        for position in range(first, end):
            if block_id := table[position // BLOCK]:
                self.slots[block_id][position % BLOCK] = history[position]

    def fill(self, block_id: int, content: list[Slot], part: tuple[int, int] | None) -> None:
        """Stores a block, or a slice `(index, count)` of its heads."""
        if part is None:
            self.slots[block_id] = content
            return
        index, count = part
        begin, end = index * len(self.heads) // count, (index + 1) * len(self.heads) // count
        nothing = (None,) * len(self.heads)
        for at, (slot, heads) in enumerate(zip(self.slots[block_id], content, strict=True)):
            others = slot or nothing
            self.slots[block_id][at] = heads and (*others[:begin], *heads, *others[end:])

    def holds(self, layers: Layers, table: list[int], history: list[Slot], first: int, end: int) -> bool:
        """True if tokens are there; of a state the last one."""
        if layers.is_state:
            return end == 0 or self.slots[table[layers.block_of(end - 1)]][0] == history[end - 1]
        for start in range(first - first % BLOCK, end, BLOCK):
            begin, stop = max(first - start, 0), min(end - start, BLOCK)
            if self.slots[table[start // BLOCK]][begin:stop] != history[start + begin : start + stop]:
                return False
        return True

    def holds_for(self, tables: list[list[int]], history: list[Slot], position: int) -> bool:
        """True if all is there that the token at a position reads of those before it."""
        groups = zip(self.groups, tables, strict=True)
        return all(
            self.holds(layers, table, history, layers.first_read(position), position) for layers, table in groups
        )

    def spoil(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self.slots[block_id] = [None] * BLOCK


def num_blocks(groups: tuple[Layers, ...]) -> int:
    """Blocks of an engine with these groups."""
    return NUM_BLOCKS + NUM_MORE_BLOCKS * (len(groups) - 1)
