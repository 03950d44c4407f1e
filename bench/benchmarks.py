"""The benchmarks of `kvpipe bench`: their cases and subjects."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from bench import subjects as of
from bench.measure import Case, parse_blocks, parse_sizes
from bench.remote import RemoteProgram

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from bench.runner import Pairs, Subject

_WAKE_BYTES = 8  # the time at which the insert began
# Namespace and block hash.
_KEY_BYTES, _NUM_KEYS = 48, 1000
# A GPU moves the amount of other rounds in a tenth of a millisecond. Ids of more blocks would take most of the time.
_GPU_ROUND_BYTES, _GPU_ROUND_BLOCKS = 32 << 30, 1 << 19
_LAYOUTS = ("contiguous", "scattered")
_BLOCKS = "4Kx8192,16Kx2048,64Kx512,256Kx128,1Mx32"


@dataclass(frozen=True)
class Benchmark:
    """What follows `kvpipe bench`.

    Attributes:
        summary: For `--help`.
        cases: The cases that arguments ask for.
        subjects: Subjects of a data path.
        without_transport: Subjects that need no transport.
        baselines: Ratios refer to the first of these that takes part.
        defaults: Of the options that only some benchmarks have.
        remote: Subjects between two hosts; `None` where that makes no sense.
    """

    summary: str
    cases: Callable[[argparse.Namespace], list[Case]]
    subjects: Callable[[str, argparse.Namespace], list[Subject]]
    without_transport: Callable[[], list[Subject]]
    baselines: tuple[str, ...]
    defaults: dict[str, str]
    remote: Callable[[argparse.Namespace], list[Subject]] | None = None


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


def _store(args: argparse.Namespace) -> list[Case]:
    sizes = parse_sizes(args.sizes)
    return [
        *(Case(kind, size) for kind in ("put", "get") for size in sizes),
        Case("wake", _WAKE_BYTES),
        Case("exists", _KEY_BYTES, _NUM_KEYS),
    ]


def _all_kinds(args: argparse.Namespace) -> list[Case]:
    pings = [Case("latency", size) for size in parse_sizes(args.latency_sizes)]
    cases = {"tensors": _tensors(args), "blocks": _blocks(args), "latency": pings}
    return [case for kind in args.kinds.split(",") for case in cases[kind]]


def _sizes(args: argparse.Namespace) -> Pairs:
    """The block sizes, as the programs want them."""
    return (("sizes", ",".join(str(size) for size in dict.fromkeys(size for size, _ in parse_blocks(args.blocks)))),)


def _remote(args: argparse.Namespace, program: str, setup: Pairs = ()) -> RemoteProgram:
    return RemoteProgram(of.ours(program, setup), args.peer, args.token)


def _pipe_subjects(data_path: str, _: argparse.Namespace) -> list[Subject]:
    return [*of.kvpipe_pipe(data_path), *of.kvpipe_polling(data_path), *of.ucx_perftest(data_path)]


def _blocks_subjects(data_path: str, args: argparse.Namespace) -> list[Subject]:
    sizes = _sizes(args)
    return [
        *of.kvpipe_blocks(data_path, sizes),
        *of.kvpipe_handoffs(data_path, sizes),
        *of.process_vm(data_path),
        *of.bare_sockets(data_path),
        *of.bare(data_path),
    ]


def _peers_subjects(data_path: str, args: argparse.Namespace) -> list[Subject]:
    sizes = _sizes(args)
    tensors = [*of.kvpipe_pipe(data_path), *of.kvpipe_polling(data_path)]
    ours = [*tensors, *of.kvpipe_blocks(data_path, sizes), *of.kvpipe_handoffs(data_path, sizes)]
    return [*ours, *of.process_vm(data_path), *of.bare(data_path), *of.peers(data_path)]


def _gpu_subjects(data_path: str, args: argparse.Namespace) -> list[Subject]:
    of.require_gpu(args.device)
    sizes = _sizes(args)
    # Torch's copies have no data path.
    gather = of.torch_gather(args.device, sizes) if data_path == of.DATA_PATHS[0] else []
    return [*of.kvpipe_gpu(data_path, args.device, sizes), *of.ucx_perftest_gpu(data_path), *gather]


def _gpu(args: argparse.Namespace) -> list[Case]:
    cases = (*_tensors(args), *_blocks(args))
    return [replace(case, round_bytes=min(_GPU_ROUND_BYTES, _GPU_ROUND_BLOCKS * case.num_bytes)) for case in cases]


BENCHMARKS: dict[str, Benchmark] = {
    "pipe": Benchmark(
        "GB/s of tensors through a Pipe, beside ucx_perftest and memcpy",
        _tensors,
        _pipe_subjects,
        lambda: [*of.memcpy(), *of.checksum()],
        ("ucx_perftest (hot)", "memcpy"),
        {"sizes": "8,4K,64K,256K,1M,4M,16M,64M"},
        lambda args: of.kvpipe_pipe("default", _remote(args, "pipe_tensors")),
    ),
    "blocks": Benchmark(
        "GB/s of blocks read by an Agent and loaded by handoffs, contiguous and scattered, beside UCX and memcpy",
        _blocks,
        _blocks_subjects,
        of.memcpy,
        ("memcpy",),
        {"blocks": _BLOCKS, "layout": "both"},
        lambda args: of.kvpipe_blocks("default", (), _remote(args, "agent_blocks", _sizes(args))),
    ),
    "gpu": Benchmark(
        "GB/s of tensors and blocks on a GPU into another process, beside ucx_perftest -m cuda and torch's gather",
        _gpu,
        _gpu_subjects,
        list,
        ("ucx_perftest -m cuda (hot)", "torch gather"),
        {"sizes": "64K,1M,16M,64M", "blocks": "4Kx8192,64Kx1024,1Mx64", "layout": "both", "device": "cuda:0"},
    ),
    "latency": Benchmark(
        "half a round trip through two Pipes, beside ucx_perftest",
        _latency,
        _pipe_subjects,
        list,
        ("ucx_perftest -E sleep", "ucx_perftest"),
        {"sizes": "8,64,512,4K,32K,256K"},
        lambda args: of.kvpipe_pipe("default", _remote(args, "pipe_tensors")),
    ),
    "lookup": Benchmark(
        "how long a waiting drop_select sleeps after an insert elsewhere, and inserts beside numpy's copy",
        _lookup,
        lambda data_path, _: of.lookup_wakes(data_path),
        of.lookup_inserts,
        ("kvpipe, producer serves", "numpy copy"),
        {"sizes": "64M"},
    ),
    "store": Benchmark(
        "values put into and read from a KVStore, how soon a waiting take wakes, and exists for many keys",
        _store,
        lambda data_path, _: [*of.kvpipe_store(data_path), *of.pipe_beside_store(data_path)],
        of.other_stores,
        ("kvpipe Pipe", "redis-benchmark, 4 connections, Redis", "redis-py, Redis", "kvpipe store"),
        {"sizes": "4M"},
    ),
    "peers": Benchmark(
        "kvpipe beside NIXL, ucxx, Mooncake, gloo, ZeroMQ, ucx_perftest, bare UCX and memcpy",
        _all_kinds,
        _peers_subjects,
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


def subjects_of(benchmark: Benchmark, data_paths: Sequence[str], args: argparse.Namespace) -> list[Subject]:
    """The subjects of every data path, then those without one; `--only` selects by parts of their names."""
    if args.peer and benchmark.remote:
        found = benchmark.remote(args)
    else:
        found = [
            *(one for data_path in data_paths for one in benchmark.subjects(data_path, args)),
            *benchmark.without_transport(),
        ]
    wanted = [name.strip().lower() for name in args.only.split(",")] if args.only else [""]
    return [one for one in found if any(name in one.name.lower() for name in wanted)]
