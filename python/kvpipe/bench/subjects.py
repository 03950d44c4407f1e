"""The subjects of `kvpipe bench`: which cases, and who takes part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpipe.bench import contestants as of
from kvpipe.bench.measure import Case, parse_blocks, parse_sizes
from kvpipe.bench.remote import RemoteProgram

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from kvpipe.bench.contest import Contestant, Pairs

_WAKE_BYTES = 8  # the time at which the insert began
_LAYOUTS = ("contiguous", "scattered")
_BLOCKS = "4Kx8192,16Kx2048,64Kx512,256Kx128,1Mx32"


@dataclass(frozen=True)
class Subject:
    """What follows `kvpipe bench`.

    Attributes:
        summary: For `--help`.
        cases: The cases that arguments ask for.
        field: Contestants of a road.
        roadless: Contestants that need no transport.
        baselines: To whom ratios are taken: the first of them that is there.
        defaults: Of the options that only some subjects have.
        remote: Contestants between two hosts; `None` where that makes no sense.
    """

    summary: str
    cases: Callable[[argparse.Namespace], list[Case]]
    field: Callable[[str, argparse.Namespace], list[Contestant]]
    roadless: Callable[[], list[Contestant]]
    baselines: tuple[str, ...]
    defaults: dict[str, str]
    remote: Callable[[argparse.Namespace], list[Contestant]] | None = None


def _tensors(args: argparse.Namespace) -> list[Case]:
    return [Case("tensors", size) for size in parse_sizes(args.sizes)]


def _latency(args: argparse.Namespace) -> list[Case]:
    return [Case("latency", size) for size in parse_sizes(args.sizes)]


def _lookup(args: argparse.Namespace) -> list[Case]:
    return [Case("wake", _WAKE_BYTES), *(Case("insert", size) for size in parse_sizes(args.sizes))]


def _blocks(args: argparse.Namespace) -> list[Case]:
    layouts = _LAYOUTS if args.layout == "both" else (args.layout,)
    shapes = parse_blocks(args.blocks)
    return [Case("blocks", size, number, layout) for layout in layouts for size, number in shapes]


def _all_kinds(args: argparse.Namespace) -> list[Case]:
    pings = [Case("latency", size) for size in parse_sizes(args.latency_sizes)]
    cases = {"tensors": _tensors(args), "blocks": _blocks(args), "latency": pings}
    return [case for kind in args.kinds.split(",") for case in cases[kind]]


def _sizes(args: argparse.Namespace) -> Pairs:
    """The block sizes, as the programs want them."""
    return (("sizes", ",".join(str(size) for size in dict.fromkeys(size for size, _ in parse_blocks(args.blocks)))),)


def _remote(args: argparse.Namespace, program: str, setup: Pairs = ()) -> RemoteProgram:
    return RemoteProgram(of.ours(program, setup), args.peer, args.token)


def _pipe_field(road: str, _: argparse.Namespace) -> list[Contestant]:
    return [*of.kvpipe_pipe(road), *of.kvpipe_polling(road), *of.bare(road), *of.ucx_perftest(road)]


def _blocks_field(road: str, args: argparse.Namespace) -> list[Contestant]:
    return [*of.kvpipe_blocks(road, _sizes(args)), *of.bare(road)]


def _everybody(road: str, args: argparse.Namespace) -> list[Contestant]:
    ours = [*of.kvpipe_pipe(road), *of.kvpipe_polling(road), *of.kvpipe_blocks(road, _sizes(args))]
    return [*ours, *of.bare(road), *of.peers(road)]


def _gpu_field(road: str, args: argparse.Namespace) -> list[Contestant]:
    of.require_gpu(args.device)
    return [*of.kvpipe_gpu(road, args.device), *of.ucx_perftest_gpu(road)]


SUBJECTS: dict[str, Subject] = {
    "pipe": Subject(
        "GB/s of tensors through a Pipe, beside bare UCX, ucx_perftest and memcpy",
        _tensors,
        _pipe_field,
        lambda: [*of.memcpy(), *of.checksum()],
        ("bare UCX", "memcpy"),
        {"sizes": "8,4K,64K,256K,1M,4M,16M,64M"},
        lambda args: of.kvpipe_pipe("default", _remote(args, "pipe_tensors")),
    ),
    "blocks": Subject(
        "GB/s of blocks read by an Agent, contiguous and scattered, beside bare UCX and memcpy",
        _blocks,
        _blocks_field,
        of.memcpy,
        ("memcpy",),
        {"blocks": _BLOCKS, "layout": "both"},
        lambda args: of.kvpipe_blocks("default", (), _remote(args, "agent_blocks", _sizes(args))),
    ),
    "gpu": Subject(
        "GB/s of tensors on a GPU through a Pipe into another process, beside ucx_perftest -m cuda",
        _tensors,
        _gpu_field,
        list,
        ("ucx_perftest -m cuda (hot)",),
        {"sizes": "64K,1M,16M,64M", "device": "cuda:0"},
    ),
    "latency": Subject(
        "half a round trip through two Pipes, beside bare UCX and ucx_perftest",
        _latency,
        _pipe_field,
        list,
        ("ucx_perftest -E sleep", "bare UCX sleeping"),
        {"sizes": "8,64,512,4K,32K,256K"},
        lambda args: of.kvpipe_pipe("default", _remote(args, "pipe_tensors")),
    ),
    "lookup": Subject(
        "how long a waiting drop_select sleeps after an insert elsewhere, and inserts beside numpy's copy",
        _lookup,
        lambda road, _: of.lookup_wakes(road),
        of.lookup_inserts,
        ("kvpipe, producer serves", "numpy copy"),
        {"sizes": "64M"},
    ),
    "peers": Subject(
        "kvpipe beside NIXL, ucxx, Mooncake, gloo, ZeroMQ, ucx_perftest, bare UCX and memcpy",
        _all_kinds,
        _everybody,
        of.memcpy,
        ("kvpipe out=", "kvpipe"),
        {
            "kinds": "tensors,blocks,latency",
            "sizes": "64K,1M,16M,64M",
            "blocks": "4Kx8192,16Kx2048,64Kx512",
            "layout": "both",
            "latency_sizes": "8",
        },
    ),
}


def contestants(subject: Subject, roads: Sequence[str], args: argparse.Namespace) -> list[Contestant]:
    """Who takes part, on every road, then those that need none; `--only` chooses by what their names hold."""
    if args.peer and subject.remote:
        found = subject.remote(args)
    else:
        found = [*(one for road in roads for one in subject.field(road, args)), *subject.roadless()]
    wanted = [name.strip().lower() for name in args.only.split(",")] if args.only else [""]
    return [one for one in found if any(name in one.name.lower() for name in wanted)]
