"""`kvpipe bench store --chaos`: arguments and output."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from bench import chaos, machine
from bench.progress import Progress
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    chaos.add_arguments(
        parser, "make N calls, beside those that fail, while servers and clients are killed, frozen and changed"
    )


def main(args: argparse.Namespace) -> int:
    """Makes the calls.

    Returns:
        0, or 1 if a promise of a store was broken.

    Raises:
        ConfigError: Something is not installed.
        SubjectError: A server does not start.
    """
    from bench.store.chaos import Chaos, programs  # noqa: PLC0415 - this option alone needs it

    found = programs()
    if not found:
        message = "neither redis-server nor valkey-server was found: scripts/servers"
        raise ConfigError(message)
    if find_spec("redis") is None:
        message = "redis is not installed; pip install 'kvpipe[valkey]'"
        raise ConfigError(message)
    seed = chaos.seed_of(args)
    facts = {**machine.machine(), "calls": args.chaos, "seed": seed}
    with tempfile.TemporaryDirectory(prefix="kvpipe-bench-store-") as folder:
        run = Chaos(Path(folder), args.chaos, seed, Progress())
        run.run()
    chaos.show(facts, run.stores, args.json)
    return 0 if all(each.is_clean for each in run.stores.values()) else 1
