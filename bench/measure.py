"""Sizes, cases, and amounts for a round. No clock, no input, no output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

UNITS = {
    "tensors": "GB/s",
    "blocks": "GB/s",
    "insert": "GB/s",
    "put": "GB/s",
    "get": "GB/s",
    "latency": "us",
    "wake": "us",
    "exists": "us",
    "first ask": "ms",
    "second ask": "ms",
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# A round then takes about 30 ms, so that clock resolution and a single late wake-up do not matter.
ROUND_BYTES = 128 << 20
_MOST_TENSORS, _LEAST_TENSORS = 1000, 4
_MOST_PINGS, _FIRST_PINGS = 300, 20
_LEAST_WORKING_SET_BYTES = 64 << 20
# A slow subject moves less in a round, so that a run takes minutes
_ROUND_S = 0.25


@dataclass(frozen=True)
class Case:
    """A case to measure.

    Attributes:
        kind: `tensors`, `blocks` or `latency`; of a LookupBuffer `insert` or `wake`; of a KVStore `put`, `get`, `wake`
            or `exists`; of vLLM with one `first ask` or `second ask`, for a prompt whose KV has `num_bytes`.
        num_bytes: Bytes of a tensor, block, entry, value or key.
        num_blocks: Blocks of one transfer, or keys of one question.
        layout: Of blocks: `contiguous` or `scattered`.
        round_bytes: About what a round moves.
    """

    kind: str
    num_bytes: int
    num_blocks: int = 1
    layout: str = ""
    round_bytes: int = ROUND_BYTES

    @property
    def label(self) -> str:
        """Label of the case, such as `64 KiB x 512 scattered`."""
        size = size_text(self.num_bytes)
        if self.kind == "exists":
            return f"{self.num_blocks} keys of {size}"
        return f"{size} x {self.num_blocks} {self.layout}" if self.kind == "blocks" else size

    @property
    def unit(self) -> str:
        """Unit of its figures."""
        return UNITS[self.kind]

    @property
    def is_timed(self) -> bool:
        """True if single events are timed, instead of bytes."""
        return self.unit == "us"

    @property
    def count(self) -> int:
        """Tensors, transfers or round trips of one round."""
        fitting = self.round_bytes // (self.num_bytes * self.num_blocks)
        if self.kind == "blocks":
            return max(1, fitting)
        most = _MOST_PINGS if self.is_timed else _MOST_TENSORS
        return max(_LEAST_TENSORS, min(most, fitting))

    @property
    def first_count(self) -> int:
        """The same for the warm-up round, which is not measured."""
        return min(self.count, _FIRST_PINGS) if self.is_timed else self.count

    def fitting_count(self, first_round_s: float) -> int:
        """The same for measured rounds, after a warm-up round of `first_round_s`."""
        least = 1 if self.kind == "blocks" else _LEAST_TENSORS
        fitting = self.first_count * _ROUND_S / max(first_round_s, 1e-9)
        return max(least, int(min(self.count, fitting)))

    def payload_bytes(self, count: int) -> int:
        """Payload of `count` tensors, transfers or round trips."""
        return self.num_bytes * self.num_blocks * count


def together(cases: Sequence[Case]) -> list[list[Case]]:
    """Returns the cases in groups that take turns: those of a kind, but of a store those of a size too.

    A store has the values of one case at a time.
    """
    groups: dict[tuple[str, int], list[Case]] = {}
    for case in cases:
        size = case.num_bytes if case.kind in ("put", "get") else 0
        groups.setdefault((case.kind, size), []).append(case)
    return list(groups.values())


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parses sizes such as `8,64K,1M` to bytes, ascending; each is a multiple of 8.

    Raises:
        ConfigError: A size has another form.
    """
    return tuple(sorted({parse_size(part.strip()) for part in text.split(",")}))


def parse_blocks(text: str) -> tuple[tuple[int, int], ...]:
    """Parses sizes and numbers of blocks such as `64Kx512,4Kx8192`, ordered by size.

    Raises:
        ConfigError: An item has another form.
    """
    return tuple(sorted({_parse_shape(part.strip()) for part in text.split(",")}))


def _parse_shape(text: str) -> tuple[int, int]:
    size, _, number = text.partition("x")
    if not number.isdecimal() or int(number) == 0:
        message = f"blocks {text!r}: expected a size and how many a transfer moves, such as 64Kx512"
        raise ConfigError(message)
    return parse_size(size), int(number)


def parse_size(text: str) -> int:
    """Parses one size such as `64K` to bytes.

    Raises:
        ConfigError: The size has another form.
    """
    digits = text.rstrip("KMG")
    unit = _UNITS.get(text[len(digits) :])
    size = int(digits) * unit if digits.isdecimal() and unit else 0
    if size == 0 or size % 8:
        message = f"size {text!r}: expected a multiple of 8 in bytes, such as 8, 64K or 1M"
        raise ConfigError(message)
    return size


def size_text(num_bytes: int) -> str:
    """Formats a size, such as `64 KiB`."""
    value, units = num_bytes, ["B", "KiB", "MiB", "GiB"]
    while value >= 1 << 10 and value % (1 << 10) == 0 and len(units) > 1:
        value >>= 10
        units.pop(0)
    return f"{value} {units[0]}"


def working_set_bytes(cache_bytes: int, cases: Sequence[Case]) -> int:
    """Returns the size of each side's buffer, which a run walks through so that no cache holds it.

    Source and destination together are 2.5 caches, so each cache line is used again after 2.5 caches of other data.
    """
    largest = max(case.num_bytes * case.num_blocks for case in cases)
    return max(cache_bytes * 5 // 4, 2 * largest, _LEAST_WORKING_SET_BYTES)
