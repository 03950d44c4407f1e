"""Parts of the runs in which processes are killed at random: arguments, counts, and their text."""

from __future__ import annotations

import secrets
import sys
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, ClassVar

from bench import report
from bench.options import refuse, require_at_least
from bench.results import Findings, Row

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any

# Of each, in words.
_SHOWN_FAILURES = 10


@dataclass
class Counts:
    """Counts of a run.

    Attributes:
        VIOLATIONS: Names of those that are 0 unless a promise was broken.
        failures: The first broken promises, in words.
    """

    VIOLATIONS: ClassVar[Sequence[str]] = ()

    failures: list[str] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """True if no promise was broken."""
        return not any(getattr(self, name) for name in self.VIOLATIONS)

    def count(self, name: str, number: int = 1) -> None:
        """Adds to a count."""
        setattr(self, name, getattr(self, name) + number)

    def fail(self, name: str, reason: str, number: int = 1) -> None:
        """Counts broken promises."""
        self.count(name, number)
        if len(self.failures) < _SHOWN_FAILURES:
            self.failures.append(f"{name}: {reason}")

    def lines(self) -> list[tuple[str, int]]:
        """Names and values."""
        names = [each.name for each in fields(self) if each.name != "failures"]
        return [(name.replace("_", " "), getattr(self, name)) for name in names]


def add_arguments(parser: argparse.ArgumentParser, about: str) -> None:
    """Adds the options of such a run."""
    parser.add_argument("--chaos", type=int, metavar="N", help=f"instead: {about}")
    parser.add_argument(
        "--seed", type=int, metavar="N", help="of --chaos; by default another one each time, which is printed"
    )


def check_arguments(args: argparse.Namespace) -> None:
    """Refuses wrong ones.

    Raises:
        ConfigError: An argument is wrong.
    """
    if args.chaos is not None:
        require_at_least(1, chaos=args.chaos)
    elif args.seed is not None:
        refuse("--seed", args.seed, "expected --chaos with it")


def seed_of(args: argparse.Namespace) -> int:
    """Returns the seed, drawn unless it was given, and prints it."""
    seed: int = secrets.randbelow(1 << 32) if args.seed is None else args.seed
    sys.stderr.write(f"seed {seed}\n")
    return seed


def show(facts: Mapping[str, Any], counts: Mapping[str, Counts], file: Path | None) -> None:
    """Prints a column of counts for each of the things that were attacked, with the first failures.

    The same goes to a JSON file, if there is to be one.
    """
    rows = [Row({"name": name}, dict(each.lines())) for name, each in counts.items()]
    failures = [f"{name}: {failure}" for name, each in counts.items() for failure in each.failures]
    found = Findings(facts, rows, details={"failures": failures})
    lines = [[name, *(str(row[name]) for row in rows)] for name in rows[0].figures]
    report.show(report.text(found, [report.table(["", *counts], lines), "\n".join(failures)]), found, file)
