"""Sizes, how often each is measured, and what is kept of the samples. No clock, no input, no output."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import quantiles
from typing import TYPE_CHECKING

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
# Enough that a round of a size takes some 50 ms: the clock and a single late wake-up do not matter.
_ROUND_BYTES = 256 << 20
_MOST_TENSORS = 1000
_LEAST_TENSORS = 4


@dataclass(frozen=True)
class Summary:
    """What is kept of samples.

    Attributes:
        median: The middle.
        p10: A tenth of the samples is below.
        p90: A tenth of the samples is above.
        num_samples: How many there were.
    """

    median: float
    p10: float
    p90: float
    num_samples: int


def summarize(samples: Sequence[float]) -> Summary:
    """Median, 10th and 90th percentile, between neighbours by proportion.

    Raises:
        ConfigError: There are no samples.
    """
    if not samples:
        message = "no samples: nothing was measured"
        raise ConfigError(message)
    if len(samples) == 1:
        return Summary(samples[0], samples[0], samples[0], 1)
    tenths = quantiles(samples, n=10, method="inclusive")
    return Summary(tenths[4], tenths[0], tenths[8], len(samples))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Sizes in bytes from text such as `8,64K,1M`, ascending; each a multiple of 8.

    Raises:
        ConfigError: One of them is something else.
    """
    return tuple(sorted({_parse_size(part.strip()) for part in text.split(",")}))


def _parse_size(text: str) -> int:
    digits = text.rstrip("KMG")
    unit = _UNITS.get(text[len(digits) :])
    size = int(digits) * unit if digits.isdecimal() and unit else 0
    if size == 0 or size % 8:
        message = f"size {text!r}: expected a multiple of 8 in bytes, such as 8, 64K or 1M"
        raise ConfigError(message)
    return size


def tensors_per_round(size: int) -> int:
    """How many tensors of a size one round moves."""
    return max(_LEAST_TENSORS, min(_MOST_TENSORS, _ROUND_BYTES // size))


def pings_per_round(size: int) -> int:
    """How many tensors of a size go there and back in one round."""
    return max(_LEAST_TENSORS, tensors_per_round(size) // 4)


def working_set_bytes(cache_bytes: int, sizes: Sequence[int]) -> int:
    """Bytes of a buffer that is walked through, so that no cache holds it: 4 caches, and 2 of the largest tensor."""
    return max(4 * cache_bytes, 2 * max(sizes))


def offsets(size: int, count: int, total: int) -> Iterator[int]:
    """Where in a buffer of `total` bytes each of `count` tensors begins, one after the other, then again."""
    stride = max(size, 64)  # a cache line, so that small tensors leave the cache too
    places = total // stride
    return (i % places * stride for i in range(count))
