"""Who takes part: kvpipe, what it is held against, and its peers, each at the best setting it offers."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvpipe import info
from kvpipe.bench.contest import Contestant, Pairs, Program, Startable
from kvpipe.bench.perftest import Perftest
from kvpipe.config import ucx_wheel_dir
from kvpipe.exceptions import TransportUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvpipe.bench.measure import Case
    from kvpipe.bench.processes import ContestantError

_BENCH = Path(__file__).parent
_CHECKOUT = _BENCH.parents[2]
# In environments without kvpipe: the programs alone, behind everything else that can be imported
_ALONE = "import runpy, sys; sys.path.append(sys.argv.pop(1)); runpy.run_module('programs', run_name='__main__')"

TENSORS, BLOCKS, LATENCY = (frozenset({kind}) for kind in ("tensors", "blocks", "latency"))
WAKE, INSERT = (frozenset({kind}) for kind in ("wake", "insert"))
ROADS = ("default", "tcp")
IN_FLIGHT: Pairs = (("in_flight", "4"),)
# UCX's defaults make TCP several times slower: what a user who knows would set
_TUNED_TCP: Pairs = (("UCX_TCP_TX_SEG_SIZE", "256k"), ("UCX_TCP_RX_SEG_SIZE", "1m"))
# As kvpipe sets: without it UCX gives up its one-sided lanes in the error mode that kvpipe needs
_ONE_SIDED: Pairs = (("UCX_RNDV_THRESH", "inf"),)
_LOOPBACK: Pairs = (("UCX_NET_DEVICES", "lo"),)
# As kvpipe.bench.bounds sets them beside each other
WITHOUT_CHECKSUM = ", no checksum"
HASH = "kvpipe checksum"
_EAGER_CAP = 32 << 10
_BUSY_POLL_US = "1000"


def road_env(road: str) -> Pairs:
    """The variables that put UCX on a road."""
    return (("UCX_TLS", "tcp"),) if road == "tcp" else ()


def _gpu_road_env(road: str) -> Pairs:
    return (("UCX_TLS", "tcp,cuda_copy"),) if road == "tcp" else ()


def kvpipe_pipe(road: str, program: Startable | None = None) -> list[Contestant]:
    """A Pipe: into memory that is there, and fresh. `program` is what runs it, by default two processes here."""
    program = program or ours("pipe_tensors", env=road_env(road))
    checked, unchecked = (("way", "checked"),), (("way", "unchecked"),)
    out, fresh = (("into", "out"), *IN_FLIGHT), (("into", "fresh"), *IN_FLIGHT)
    return [
        Contestant("kvpipe out=", road, program, TENSORS, (*out, *checked), is_ours=True),
        Contestant(f"kvpipe out={WITHOUT_CHECKSUM}", road, program, TENSORS, (*out, *unchecked), is_ours=True),
        Contestant("kvpipe fresh", road, program, TENSORS, (*fresh, *checked), is_ours=True),
        Contestant(f"kvpipe fresh{WITHOUT_CHECKSUM}", road, program, TENSORS, (*fresh, *unchecked), is_ours=True),
        Contestant("kvpipe", road, program, LATENCY, checked, is_ours=True),
    ]


def kvpipe_polling(road: str) -> list[Contestant]:
    """A Pipe that looks for more for longer than any message takes, before it sleeps."""
    program = ours("pipe_tensors", (("busy_poll_us", _BUSY_POLL_US),), road_env(road))
    return [Contestant("kvpipe polling", road, program, LATENCY, (("way", "checked"),), is_ours=True)]


def kvpipe_blocks(road: str, setup: Pairs, program: Startable | None = None) -> list[Contestant]:
    """An Agent that reads blocks of the sizes that `setup` names."""
    program = program or ours("agent_blocks", setup, road_env(road))
    checked, unchecked = (("way", "checked"),), (("way", "unchecked"),)
    return [
        Contestant("kvpipe", road, program, BLOCKS, checked, is_ours=True),
        Contestant(f"kvpipe{WITHOUT_CHECKSUM}", road, program, BLOCKS, unchecked, is_ours=True),
    ]


def memcpy() -> list[Contestant]:
    """Copies of one thread in one process."""
    program = ours("memcpy_tensors", roles=("copy",))
    return [
        Contestant("memcpy", "", program, TENSORS, (("into", "out"),)),
        Contestant("memcpy fresh", "", program, TENSORS, (("into", "fresh"),)),
        Contestant("memcpy", "", _bare(roles=("copy",)), BLOCKS),
    ]


def checksum() -> list[Contestant]:
    """The checksum of a Pipe alone, by one thread."""
    return [Contestant(HASH, "", ours("checksum_tensors", roles=("alone",)), TENSORS, is_ours=True)]


def lookup_wakes(road: str) -> list[Contestant]:
    """A LookupBuffer between processes, which the producer's serves or one of its own."""
    served = ours("lookup_wakes", env=road_env(road), roles=("consumer", "serving_producer"))
    apart = ours("lookup_wakes", env=road_env(road), roles=("consumer", "producer", "server"))
    return [
        Contestant("kvpipe, producer serves", road, served, WAKE, is_ours=True),
        Contestant("kvpipe, server apart", road, apart, WAKE, is_ours=True),
    ]


def lookup_inserts() -> list[Contestant]:
    """A LookupBuffer of one process, beside numpy's copy into new memory."""
    program = ours("lookup_inserts", roles=("alone",))
    return [
        Contestant("kvpipe insert", "", program, INSERT, (("by", "insert"),), is_ours=True),
        Contestant("numpy copy", "", program, INSERT, (("by", "copy"),)),
    ]


def bare(road: str) -> list[Contestant]:
    """UCX without kvpipe: `rust/ucx/examples/bare_loop`."""
    program = _bare(env=(*_LOOPBACK, *road_env(road)))
    latency = [
        Contestant("bare UCX sleeping", road, program, LATENCY),
        Contestant("bare UCX polling", road, program, LATENCY, (("wait", "poll"),)),
    ]
    one_sided = [Contestant("bare UCX, a get a block", road, program, BLOCKS)] if road == "default" else []
    return [Contestant("bare UCX", road, program, TENSORS), *latency, *one_sided]


def ucx_perftest(road: str) -> list[Contestant]:
    """UCX's own tool, with the settings of kvpipe."""
    tool = Perftest((*_LOOPBACK, *_ONE_SIDED, *_TUNED_TCP, *road_env(road)))
    messages = (("test", "ucp_am_bw"),)
    reads = (("test", "ucp_get"), ("in_flight", "4"))
    streams = messages if road == "tcp" else reads
    latency = (("test", "ucp_am_lat"),)
    return [
        Contestant("ucx_perftest (hot)", road, tool, TENSORS, streams, fits=_is_large),
        Contestant("ucx_perftest -E sleep", road, tool, LATENCY, (*latency, ("wait", "sleep"))),
        Contestant("ucx_perftest", road, tool, LATENCY, latency),
    ]


def _is_large(case: Case) -> bool:
    """Smaller tensors travel in messages; reading them one by one would be another thing."""
    return case.num_bytes > _EAGER_CAP


def require_gpu(device: str) -> None:
    """Finds out whether tensors can be there.

    Raises:
        TransportUnavailableError: No.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        message = "kvpipe bench gpu needs torch, which makes the tensors: pip install torch"
        raise TransportUnavailableError(message) from error
    if not torch.cuda.is_available():
        message = f"there is no {device}: torch sees no CUDA device; run this where there is one, with torch for CUDA"
        raise TransportUnavailableError(message)
    if not info()["ucx_has_cuda"]:
        message = "this UCX has no CUDA: pip install 'kvpipe[ucx-cu12]', and let UCX_TLS, if set, allow cuda"
        raise TransportUnavailableError(message)


def kvpipe_gpu(road: str, device: str) -> list[Contestant]:
    """A Pipe between tensors on a GPU, in place."""
    program = ours("gpu_tensors", (("device", device),), _gpu_road_env(road))
    return [Contestant("kvpipe out= on the GPU", road, program, TENSORS, IN_FLIGHT, is_ours=True)]


def ucx_perftest_gpu(road: str) -> list[Contestant]:
    """UCX's own tool between buffers on a GPU, read as kvpipe reads them; without gets over TCP."""
    if road == "tcp":
        return []
    tool = Perftest((*_LOOPBACK, *_ONE_SIDED, ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")))
    reads = (("test", "ucp_get"), ("in_flight", "4"), ("memory", "cuda"))
    return [Contestant("ucx_perftest -m cuda (hot)", road, tool, TENSORS, reads)]


def nixl(road: str) -> list[Contestant]:
    """NIXL, READ and WRITE; over TCP as it ships and with UCX's segments as kvpipe sets them."""
    tunings: dict[str, Pairs] = {"": (), ", tuned segments": _TUNED_TCP} if road == "tcp" else {"": ()}
    return [
        Contestant(f"NIXL {op}{name}", road, _peer("nixl_blocks", (("op", op),), (*env, *road_env(road))), BLOCKS)
        for name, env in tunings.items()
        for op in ("READ", "WRITE")
    ]


def mooncake() -> list[Contestant]:
    """Mooncake's transfer engine, which has TCP and RDMA."""
    libraries = _CHECKOUT / ".venv-peers/lib-system"
    path = ":".join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]))
    env = (("LD_LIBRARY_PATH", path), ("GLOG_minloglevel", "2"))
    return [
        Contestant(f"Mooncake {op}", "tcp", _peer("mooncake_blocks", (("op", op),), env), BLOCKS)
        for op in ("READ", "WRITE")
    ]


def ucxx(road: str) -> list[Contestant]:
    """RAPIDS' ucxx as it ships, and with UCX set as kvpipe sets it; its blocking mode has the lowest latency."""
    kinds, env = TENSORS | LATENCY, road_env(road)
    tuned = (*_ONE_SIDED, *_TUNED_TCP, *env)
    blocking = (*tuned, ("UCXPY_PROGRESS_MODE", "blocking"))
    return [
        Contestant("ucxx", road, _peer("ucxx_tensors", env=env), kinds, IN_FLIGHT),
        Contestant("ucxx, tuned", road, _peer("ucxx_tensors", env=tuned), kinds, IN_FLIGHT),
        Contestant("ucxx, tuned, blocking", road, _peer("ucxx_tensors", env=blocking), LATENCY),
    ]


def zeromq() -> list[Contestant]:
    """ZeroMQ over both of its transports between processes."""
    roads = {"ipc": "default", "tcp": "tcp"}
    return [
        Contestant(f"ZeroMQ {name}", road, _peer("zmq_tensors", (("endpoint", name),)), TENSORS | LATENCY)
        for name, road in roads.items()
    ]


def gloo() -> list[Contestant]:
    """torch.distributed on CPUs; with the torch of kvpipe's own environment."""
    return [Contestant("gloo", "tcp", ours("gloo_tensors"), TENSORS | LATENCY, IN_FLIGHT)]


def peers(road: str) -> list[Contestant]:
    """All of a road that is not kvpipe, memcpy or bare UCX."""
    both = [*ucx_perftest(road), *nixl(road), *ucxx(road)]
    return [*both, *(one for one in (*mooncake(), *zeromq(), *gloo()) if one.road == road)]


def ours(name: str, setup: Pairs = (), env: Pairs = (), roles: Sequence[str] = ("active", "passive")) -> Program:
    """A program that runs in this environment."""
    command = (sys.executable, "-m", "kvpipe.bench.programs", name)
    return Program(name, command, tuple(roles), setup, env)


def _peer(name: str, setup: Pairs = (), env: Pairs = ()) -> Program:
    python = os.environ.get("KVPIPE_BENCH_PEERS_PYTHON") or _CHECKOUT / ".venv-peers/bin/python"
    if not Path(python).exists():
        python = sys.executable
    command = (str(python), "-c", _ALONE, str(_BENCH), name)
    return Program(name, command, setup=setup, env=(*_LOOPBACK, *env), is_paused=True)


def _bare(env: Pairs = (), roles: Sequence[str] = ("active", "passive")) -> Program:
    target = Path(os.environ.get("CARGO_TARGET_DIR") or _CHECKOUT / "target")
    wheel = ucx_wheel_dir()
    library = (("KVPIPE_UCX_LIB", f"{wheel}/lib/libucp.so.0"),) if wheel and "KVPIPE_UCX_LIB" not in os.environ else ()
    return Program("bare_loop", (str(target / "release/examples/bare_loop"),), tuple(roles), env=(*library, *env))


REMEDIES = {
    "bare_loop": "cargo build --release --example bare_loop -p kvpipe-ucx, or make bench",
    "gloo_tensors": "install torch",
    "nixl_blocks": "make bench-peers",
    "ucxx_tensors": "make bench-peers",
    "zmq_tensors": "make bench-peers",
    "mooncake_blocks": "make bench-peers",
}


def reason(contestant: Contestant, error: ContestantError) -> str:
    """Why it does not take part, with what can be done when it is not installed."""
    text = str(error)
    is_missing = "ModuleNotFoundError" in text or "ImportError" in text or "cannot start" in text
    remedy = REMEDIES.get(getattr(contestant.program, "name", ""))
    return f"{text} ({remedy})" if is_missing and remedy else text
