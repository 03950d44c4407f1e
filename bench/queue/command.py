"""`kvpipe bench queue`: arguments and output."""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench import chaos, machine
from bench.instances import broker_process
from bench.options import require_at_least, require_folders
from bench.progress import Progress
from bench.report import show
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    import argparse

SUMMARY = "requests through a RabbitMQ broker beside direct dispatch; or what is lost when processes are killed"
_LEAST_ROUNDS = 5
_CHAOS_FRONTS = 2
_NEEDED = ("aio_pika", "aiohttp", "orjson", "prometheus_client", "uvloop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--rounds", type=int, default=_LEAST_ROUNDS, metavar="N", help="at least 5, default 5")
    add("--requests", type=int, default=2000, metavar="N", help="of a round, for requests/s; default 2000")
    add("--workers", type=int, default=2, metavar="N", help="decode instances, each with a worker; default 2")
    chaos.add_arguments(parser, "ask N requests while front ends, workers and the broker are killed")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark.

    Returns:
        0, or 1 if --chaos has lost, repeated or left anything.

    Raises:
        ConfigError: An argument is wrong, or something is not installed.
        SubjectError: kvpipe could not be measured.
    """
    _check(args)
    with tempfile.TemporaryDirectory(prefix="kvpipe-bench-queue-") as folder:
        return _measure(args, Path(folder)) if args.chaos is None else _survive(args, Path(folder))


def _check(args: argparse.Namespace) -> None:
    chaos.check_arguments(args)
    require_at_least(_LEAST_ROUNDS, rounds=args.rounds)
    require_at_least(1, requests=args.requests, workers=args.workers)
    require_folders(args.json)
    if reason := broker_process.missing():
        raise ConfigError(reason)
    for module in _NEEDED:
        if find_spec(module) is None:
            message = f"{module} is not installed; pip install 'kvpipe[amqp]'"
            raise ConfigError(message)


def _measure(args: argparse.Namespace, folder: Path) -> int:
    from bench.queue import results  # noqa: PLC0415 - needs the packages that were checked
    from bench.queue.deployment import Deployment  # noqa: PLC0415
    from bench.queue.measure import LOAD, measure  # noqa: PLC0415

    facts = {**machine.machine(), **_facts(args), "rounds": args.rounds, "requests": args.requests}
    with Deployment(folder, 1, args.workers, has_direct=True) as deployment:
        if (direct := deployment.direct) is None:
            return 1
        samples = measure(deployment, direct, args.rounds, args.requests, Progress())
    found = results.findings_of({**facts, "load_average_after": machine.load_average()}, *samples)
    show(results.text(found, LOAD), found, args.json)
    return 0


def _survive(args: argparse.Namespace, folder: Path) -> int:
    from bench.queue.chaos import MAX_MESSAGE_BYTES, Chaos  # noqa: PLC0415 - needs the packages that were checked
    from bench.queue.deployment import Deployment  # noqa: PLC0415

    seed = chaos.seed_of(args)
    facts = {**machine.machine(), **_facts(args), "requests": args.chaos, "seed": seed}
    with Deployment(
        folder,
        1,
        args.workers,
        num_fronts=_CHAOS_FRONTS,
        has_direct=False,
        max_message_bytes=MAX_MESSAGE_BYTES,
    ) as deployment:
        run = Chaos(deployment, args.chaos, seed, Progress())
        run.run()
    chaos.show(facts, {"requests": run.found}, args.json)
    return 0 if run.found.is_clean else 1


def _facts(args: argparse.Namespace) -> dict[str, Any]:
    return {"workers": args.workers}
