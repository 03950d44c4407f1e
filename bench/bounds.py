"""The cost of checksums: throughput with them, beside the serial bound. No clock, no input, no output.

The serial bound is the speed of one thread that hashes each byte and then moves it: 1/(1/copy + 1/hash). Copy is the
same subject without checksums. Hash is the checksum alone, over memory that no cache holds. Both are of the same run. A
subject above the bound hashes while another thread moves bytes, or hashes bytes that are still in the cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bench.results import Row, median_ratio, summarize
from bench.subjects import HASH, WITHOUT_CHECKSUM
from bench.transports import labels_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.runner import Entry


def bounds_of(entries: Sequence[Entry]) -> list[Row]:
    """Returns a bound for each subject with figures with, without and of the checksum alone.

    Its figures, in GB/s, are `value` (with checksums), `copy`, `hash` and `serial`, each round by round, and `ratio`:
    of `value` to `serial`.
    """
    named = {(entry.case, entry.subject.data_path, entry.subject.name): entry for entry in entries}
    bounds = []
    for (case, data_path, name), entry in named.items():
        copy, hashed = named.get((case, data_path, f"{name}{WITHOUT_CHECKSUM}")), named.get((case, "", HASH))
        if copy and hashed:
            bounds.append(_bound(entry, copy, hashed))
    return bounds


def _bound(entry: Entry, copy: Entry, hashed: Entry) -> Row:
    serial = [1 / (1 / moved + 1 / summed) for moved, summed in zip(copy.values, hashed.values, strict=True)]
    parts = {"value": entry.values, "copy": copy.values, "hash": hashed.values, "serial": serial}
    return Row(
        labels_of(entry.case, entry.subject.name, entry.subject.data_path),
        {name: summarize(values) for name, values in parts.items()} | {"ratio": median_ratio(entry.values, serial)},
    )
