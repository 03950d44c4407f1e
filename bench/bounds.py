"""The cost of checksums: throughput with them, beside the serial bound. No clock, no input, no output.

The serial bound is the speed of one thread that hashes each byte and then moves it: 1/(1/copy + 1/hash). Copy is the
same subject without checksums. Hash is the checksum alone, over memory that no cache holds. Both are of the same run. A
subject above the bound hashes while another thread moves bytes, or hashes bytes that are still in the cache.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.measure import Case, Summary, summarize
from bench.subjects import HASH, WITHOUT_CHECKSUM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.results import Entry


@dataclass(frozen=True)
class Bound:
    """One subject with checksums, and its bound. All in GB/s.

    Attributes:
        case: What was measured.
        subject: Who.
        data_path: `default` or `tcp`.
        value: With checksums.
        copy: The same without.
        hash: The checksum alone.
        serial: 1/(1/copy + 1/hash), measured round by round.
        ratio: Of `value` to `serial`: the median of the ratios of the rounds.
    """

    case: Case
    subject: str
    data_path: str
    value: Summary
    copy: Summary
    hash: Summary
    serial: Summary
    ratio: float

    def as_json(self) -> dict[str, Any]:
        """The bound with plain types."""
        fields = asdict(self)
        del fields["case"]
        return {"kind": self.case.kind, "bytes": self.case.num_bytes, **fields, "unit": self.case.unit}


def bounds_of(entries: Sequence[Entry]) -> list[Bound]:
    """Returns a bound for each subject with figures with, without and of the checksum alone."""
    named = {(entry.case, entry.subject.data_path, entry.subject.name): entry for entry in entries}
    bounds = []
    for (case, data_path, name), entry in named.items():
        copy, hashed = named.get((case, data_path, f"{name}{WITHOUT_CHECKSUM}")), named.get((case, "", HASH))
        if copy and hashed:
            bounds.append(_bound(entry, copy, hashed))
    return bounds


def _bound(entry: Entry, copy: Entry, hashed: Entry) -> Bound:
    rounds = list(zip(entry.values, copy.values, hashed.values, strict=True))
    serial = [1 / (1 / moved + 1 / summed) for _, moved, summed in rounds]
    ratio = median(value / bound for (value, _, _), bound in zip(rounds, serial, strict=True))
    return Bound(
        entry.case,
        entry.subject.name,
        entry.subject.data_path,
        summarize(entry.values),
        summarize(copy.values),
        summarize(hashed.values),
        summarize(serial),
        ratio,
    )
