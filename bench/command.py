"""`kvpipe bench`: arguments and output."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from bench import builds, chaos, machine, measure, plot, remote, report, transports
from bench.benchmarks import BENCHMARKS, Benchmark, subjects_of
from bench.bounds import bounds_of
from bench.handoff import command as handoff
from bench.measure import UNITS
from bench.options import refuse, require_folders, require_memory
from bench.progress import Progress
from bench.queue import command as queue
from bench.results import Findings, Row
from bench.reuse import command as reuse
from bench.run import Run
from bench.scale import command as scale
from bench.serving import command as serving
from bench.store import command as store
from bench.subjects import DATA_PATHS
from bench.transports import rows_of
from kvpipe._help import add_examples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.measure import Case

_LEAST_ROUNDS = 5
_KINDS = ("tensors", "blocks", "latency")
_WITHOUT_VLLM = ("sizes", "data_path", "baseline", "working_set", "pin", "against")
_WITH_VLLM = ("tokens", "lmcache", "work")
# Benchmarks that have arguments and output of their own.
_WITH_COMMANDS = {"handoff": handoff.main, "queue": queue.main, "scale": scale.main, "serving": serving.main}
_ASSUMED_CACHE_BYTES = 32 << 20
_LATENCY_BUFFER_BYTES = 1 << 20
_HELP = {
    "sizes": "bytes of tensors, such as 64K,1M",
    "blocks": "size and number of blocks of a transfer, such as 64Kx512,4Kx8192",
    "layout": "contiguous, scattered or both",
    "kinds": "of cases: tensors, blocks, latency",
    "latency_sizes": "bytes of the messages for latency",
    "device": "the GPU of both processes, such as cuda:0",
}
_EPILOG = (
    "Each cell is the median of the rounds, with the 10th and 90th percentile in brackets. ratio: to the baseline "
    "of the same data path, the median of the ratios of the rounds. CPU: of both sides. GB/s are 10^9 bytes of payload."
)


def main(arguments: Sequence[str]) -> int:
    """Runs a benchmark and prints its tables.

    Args:
        arguments: What follows `kvpipe bench`.

    Returns:
        The exit status.

    Raises:
        ConfigError: An argument is bad.
        SubjectError: kvpipe itself could not be measured.
    """
    args = parse(arguments)
    if args.benchmark == "serve":
        remote.serve(args.listen, args.token)
        return 0
    if args.benchmark in _WITH_COMMANDS:
        return _WITH_COMMANDS[args.benchmark](args)
    _check(args)
    if getattr(args, "chaos", None) is not None:
        return store.main(args)
    old = transports.read_json(args.compare) if args.compare else None
    found = reuse.measure(args) if args.vllm else _measure(BENCHMARKS[args.benchmark], args)
    text = report.text(found, transports.tables(found))
    report.show(f"{text}\n\n{transports.comparison(old, found)}" if old else text, found, args.json)
    if args.plot:
        plot.write(args.plot, found.rows, "{cpu}, {num_cpus} CPUs, UCX {ucx}".format_map(found.facts))
    return 0


# --- arguments --------------------------------------------------------------------------------------------------


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments."""
    parser = argparse.ArgumentParser(
        prog="kvpipe bench", description="Measures kvpipe beside other transports and connectors."
    )
    add_examples(parser, ("kvpipe bench pipe", "kvpipe bench pipe --only kvpipe,memcpy --json figures.json"))
    benchmarks = parser.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK", dest="benchmark")
    for name, benchmark in BENCHMARKS.items():
        _add_benchmark(
            benchmarks.add_parser(name, help=benchmark.summary, description=benchmark.summary, epilog=_EPILOG),
            benchmark,
        )
    handoff.add_arguments(benchmarks.add_parser("handoff", help=handoff.SUMMARY, description=handoff.SUMMARY))
    queue.add_arguments(benchmarks.add_parser("queue", help=queue.SUMMARY, description=queue.SUMMARY))
    scale.add_arguments(benchmarks.add_parser("scale", help=scale.SUMMARY, description=scale.SUMMARY))
    serving.add_arguments(benchmarks.add_parser("serving", help=serving.SUMMARY, description=serving.SUMMARY))
    server = benchmarks.add_parser("serve", help="the other side of a benchmark between two hosts")
    server.add_argument("--listen", required=True, metavar="HOST:PORT", help="address for the other host")
    _add_token(server)
    return parser.parse_args(arguments)


def _add_benchmark(parser: argparse.ArgumentParser, benchmark: Benchmark) -> None:
    for name, default in benchmark.defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, default=default, metavar="LIST", help=f"{_HELP[name]}; default {default}")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="at least 5, default 7")
    parser.add_argument("--data-path", default="both", help="default (what UCX chooses), tcp, or both; default both")
    parser.add_argument(
        "--only", metavar="NAMES", help="subjects whose names contain one of these, such as kvpipe,nixl"
    )
    parser.add_argument("--baseline", metavar="NAME", help=f"ratios to this one, default {benchmark.baselines[0]}")
    parser.add_argument("--working-set", metavar="SIZE", help="bytes of each buffer; default 1.25 of the largest cache")
    parser.add_argument(
        "--pin", action="store_true", help="pin each process of a subject to its own CPU, as numactl does"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw them; needs matplotlib")
    parser.add_argument("--compare", type=Path, metavar="OLD.json", help="print ratios to an older run")
    parser.add_argument(
        "--against",
        type=Path,
        metavar="PYTHON",
        help="measure the kvpipe of another environment in the same rounds; "
        f"all processes are started anew every {builds.ROUNDS_A_START} rounds",
    )
    if benchmark is BENCHMARKS["store"]:
        reuse.add_arguments(parser)
        store.add_arguments(parser)
    parser.set_defaults(peer=None, token=None, vllm=False)
    if benchmark.remote:
        parser.add_argument(
            "--peer", metavar="HOST:PORT", help="measure between this host and the one that runs `kvpipe bench serve`"
        )
        _add_token(parser)


def _add_token(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--token", help="shared secret; better in KVPIPE_TOKEN, which other users cannot see")


def _check(args: argparse.Namespace) -> None:
    """Refuses wrong arguments before the measurement."""
    if args.rounds < _LEAST_ROUNDS:
        refuse("--rounds", args.rounds, f"a median with percentiles needs at least {_LEAST_ROUNDS}")
    if args.data_path not in (*DATA_PATHS, "both"):
        refuse("--data-path", args.data_path, f"expected {', '.join(DATA_PATHS)} or both")
    if "layout" in args and args.layout not in ("contiguous", "scattered", "both"):
        refuse("--layout", args.layout, "expected contiguous, scattered or both")
    for kind in args.kinds.split(",") if "kinds" in args else ():
        if kind not in _KINDS:
            refuse("--kinds", kind, f"expected some of {','.join(_KINDS)}")
    require_folders(args.json, args.plot)
    if args.plot:
        plot.require()
    _check_against(args)
    _check_vllm(args)
    _check_chaos(args)
    if args.peer:
        _check_peer(args)


def _check_against(args: argparse.Namespace) -> None:
    if args.against and args.peer:
        refuse("--against", "with --peer", "builds are compared on one host")
    if args.against and not os.access(args.against, os.X_OK):
        refuse("--against", args.against, "expected the Python of an environment with kvpipe")


def _check_vllm(args: argparse.Namespace) -> None:
    defaults = parse(["store"])
    names, where = (_WITHOUT_VLLM, "with --vllm") if args.vllm else (_WITH_VLLM, "without --vllm")
    for name in names:
        default = getattr(defaults, name)
        if getattr(args, name, default) != default:
            refuse(f"--{name.replace('_', '-')}", where, "it has no meaning there")


def _check_chaos(args: argparse.Namespace) -> None:
    if args.benchmark != "store":
        return
    chaos.check_arguments(args)
    if args.chaos is None:
        return
    defaults = vars(parse(["store"])) | {name: getattr(args, name) for name in ("chaos", "seed", "json")}
    for name, default in defaults.items():
        if getattr(args, name) != default:
            refuse(f"--{name.replace('_', '-')}", "with --chaos", "it has no meaning there")


def _check_peer(args: argparse.Namespace) -> None:
    remote.split_address(args.peer)
    if args.pin:
        refuse("--pin", "with --peer", "start both commands with taskset instead")


# --- measuring --------------------------------------------------------------------------------------------------


def _measure(benchmark: Benchmark, args: argparse.Namespace) -> Findings:
    facts = machine.machine()
    cases = benchmark.cases(args)
    total = _working_set(args, facts["cache_bytes"], cases)
    pinned: dict[str, object] = {"is_pinned": 1} if args.pin else {}
    facts |= pinned | {"working_set_bytes": total, "rounds": args.rounds, "peer": args.peer}
    subjects = subjects_of(benchmark, _data_paths(args), args)
    fitting = [one for one in subjects if any(one.can(case) for case in cases)]
    if not fitting:
        refuse("--only", args.only, "no subject has such a name")
    if all(one.missing for one in fitting):
        refuse("--only", args.only, fitting[0].missing)
    baselines = (args.baseline,) if args.baseline else benchmark.baselines
    if args.against:
        subjects = builds.beside(subjects, str(args.against))
    skipped: dict[str, str] = {}
    versions: set[str] = set()
    rows: list[Row] = []
    bounds: list[Row] = []
    differences: list[Row] = []
    progress = Progress()
    for chosen in measure.together(cases):
        with Run(subjects, chosen, progress) as run:
            run.start(_words(run, total, chosen[0].kind) | pinned)
            run.measure(args.rounds, builds.ROUNDS_A_START if args.against else None)
        rows += rows_of(run.entries, baselines)
        bounds += bounds_of(run.entries)
        differences += builds.differences_of(run.entries)
        skipped |= run.skipped
        versions |= run.versions
    facts |= {"peers": " ".join(sorted(versions)), "load_average_after": machine.load_average()}
    return Findings(facts, rows, skipped, {"bounds": bounds, "differences": differences})


def _data_paths(args: argparse.Namespace) -> tuple[str, ...]:
    """The data paths to measure: one, if the user has chosen it by a variable."""
    if args.data_path == "both":
        return ("default",) if {"UCX_TLS", "KVPIPE_DATA_PATH"} & os.environ.keys() else DATA_PATHS
    return (args.data_path,)


def _working_set(args: argparse.Namespace, cache_bytes: int | None, cases: Sequence[Case]) -> int:
    least = 2 * max(case.num_bytes * case.num_blocks for case in cases)
    if not args.working_set:
        return measure.working_set_bytes(cache_bytes or _ASSUMED_CACHE_BYTES, cases)
    total = measure.parse_size(args.working_set)
    if total < least:
        refuse("--working-set", args.working_set, f"the largest case needs {measure.size_text(least)}")
    return total


def _words(run: Run, total: int, kind: str) -> dict[str, object]:
    """Words for every process, if there is enough memory for all."""
    if UNITS[kind] == "us":
        total = max([_LATENCY_BUFFER_BYTES, *(entry.case.num_bytes for entry in run.entries)])
    buffers = f"the buffers of {run.num_processes} processes"
    remedy = "a smaller --working-set or fewer subjects with --only help"
    require_memory(total * run.num_processes, buffers, remedy)
    return {"total": total}
