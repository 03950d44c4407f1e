"""The subjects: kvpipe, its baselines and other libraries, each at its best setting."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.checkout import ROOT
from bench.perftest import Perftest
from bench.runner import Pairs, Program, Startable, Subject
from kvpipe import info
from kvpipe.config import ucx_wheel_dir
from kvpipe.exceptions import TransportUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.measure import Case
    from bench.processes import SubjectError

_PROGRAMS = ("-m", "bench.programs")
TENSORS, BLOCKS, LATENCY = (frozenset({kind}) for kind in ("tensors", "blocks", "latency"))
WAKE, INSERT, EXISTS = (frozenset({kind}) for kind in ("wake", "insert", "exists"))
VALUES = frozenset({"put", "get"})
DATA_PATHS = ("default", "tcp")
IN_FLIGHT: Pairs = (("in_flight", "4"),)
# A GPU copies 64 MiB in less time than an operation's messages take: these hide behind other copies.
_GPU_IN_FLIGHT: Pairs = (("in_flight", "16"),)
# An expert's setting: UCX's defaults make TCP several times slower
_TUNED_TCP: Pairs = (("UCX_TCP_TX_SEG_SIZE", "256k"), ("UCX_TCP_RX_SEG_SIZE", "1m"))
# As kvpipe sets it: otherwise UCX drops its one-sided lanes in the error mode that kvpipe needs
_ONE_SIDED: Pairs = (("UCX_RNDV_THRESH", "inf"),)
_LOOPBACK: Pairs = (("UCX_NET_DEVICES", "lo"),)
# bench.bounds finds pairs by this suffix
WITHOUT_CHECKSUM = ", no checksum"
HASH = "kvpipe checksum"
LMCACHE_PYTHON = "KVPIPE_BENCH_LMCACHE_PYTHON"
_EAGER_CAP = 32 << 10
_BUSY_POLL_US = "1000"
# Of jemalloc: memory that was freed is not given back to the kernel, and costs no page faults when it is used again.
_KEEPING_MEMORY: Pairs = (("MALLOC_CONF", "dirty_decay_ms:-1,muzzy_decay_ms:-1"),)


def data_path_env(data_path: str) -> Pairs:
    """Variables that restrict kvpipe to a data path; older builds, which are compared with, know UCX's alone."""
    return (("KVPIPE_DATA_PATH", "tcp"), *ucx_env(data_path)) if data_path == "tcp" else ()


def ucx_env(data_path: str) -> Pairs:
    """Variables that restrict UCX to a data path."""
    return (("UCX_TLS", "tcp"),) if data_path == "tcp" else ()


def _gpu_env(data_path: str) -> Pairs:
    return (("UCX_TLS", "tcp,cuda_copy"),) if data_path == "tcp" else ()


def kvpipe_pipe(data_path: str, program: Startable | None = None) -> list[Subject]:
    """A Pipe, receiving into existing and into fresh memory. By default `program` is two processes on this host."""
    program = program or ours("pipe_tensors", env=data_path_env(data_path))
    checked, unchecked = (("way", "checked"),), (("way", "unchecked"),)
    out, fresh = (("into", "out"), *IN_FLIGHT), (("into", "fresh"), *IN_FLIGHT)
    return [
        Subject("kvpipe out=", data_path, program, TENSORS, (*out, *checked), is_ours=True),
        Subject(f"kvpipe out={WITHOUT_CHECKSUM}", data_path, program, TENSORS, (*out, *unchecked), is_ours=True),
        Subject("kvpipe fresh", data_path, program, TENSORS, (*fresh, *checked), is_ours=True),
        Subject(f"kvpipe fresh{WITHOUT_CHECKSUM}", data_path, program, TENSORS, (*fresh, *unchecked), is_ours=True),
        Subject("kvpipe", data_path, program, LATENCY, checked, is_ours=True),
    ]


def kvpipe_polling(data_path: str) -> list[Subject]:
    """A Pipe that polls for longer than any message takes, before it sleeps."""
    program = ours("pipe_tensors", (("busy_poll_us", _BUSY_POLL_US),), data_path_env(data_path))
    return [Subject("kvpipe polling", data_path, program, LATENCY, (("way", "checked"),), is_ours=True)]


def kvpipe_blocks(data_path: str, setup: Pairs, program: Startable | None = None) -> list[Subject]:
    """An Agent that reads blocks of the sizes in `setup`."""
    program = program or ours("agent_blocks", setup, data_path_env(data_path))
    checked, unchecked = (("way", "checked"),), (("way", "unchecked"),)
    return [
        Subject("kvpipe", data_path, program, BLOCKS, checked, is_ours=True),
        Subject(f"kvpipe{WITHOUT_CHECKSUM}", data_path, program, BLOCKS, unchecked, is_ours=True),
    ]


def kvpipe_handoffs(data_path: str, setup: Pairs) -> list[Subject]:
    """Loads of handoffs whose blocks are validated, of the sizes in `setup`."""
    program = ours("handoff_blocks", (("integrity", "validate"), *setup), data_path_env(data_path))
    return [Subject("kvpipe handoff, validate", data_path, program, BLOCKS, is_ours=True)]


def memcpy() -> list[Subject]:
    """Copies by one thread in one process."""
    program = ours("memcpy_tensors", roles=("copy",))
    return [
        Subject("memcpy", "", program, TENSORS, (("into", "out"),)),
        Subject("memcpy fresh", "", program, TENSORS, (("into", "fresh"),)),
        Subject("memcpy", "", _bare(roles=("copy",)), BLOCKS),
    ]


def bare_sockets(data_path: str) -> list[Subject]:
    """Two processes with nothing but `sendmsg` and `readv` on one connection; and the same sealed with AES-128-GCM."""
    if data_path != "tcp":
        return []
    over = ("over", "sockets")
    return [
        Subject("bare sockets", data_path, _bare(setup=(over,)), BLOCKS),
        Subject("bare sockets, sealed", data_path, _bare(setup=(over, ("sealed", "yes"))), BLOCKS),
    ]


def process_vm(data_path: str) -> list[Subject]:
    """The calls to the kernel of the default data path on one host, and nothing else."""
    program = ours("process_vm_blocks", (("op", "READ"),))
    return [Subject("process_vm_readv", data_path, program, BLOCKS)] if data_path == "default" else []


def checksum() -> list[Subject]:
    """A Pipe's checksum alone, by one thread."""
    return [Subject(HASH, "", ours("checksum_tensors", roles=("alone",)), TENSORS, is_ours=True)]


def lookup_wakes(data_path: str) -> list[Subject]:
    """A LookupBuffer between processes, served by the producer's process or by a third one."""
    served = ours("lookup_wakes", env=data_path_env(data_path), roles=("consumer", "serving_producer"))
    apart = ours("lookup_wakes", env=data_path_env(data_path), roles=("consumer", "producer", "server"))
    return [
        Subject("kvpipe, producer serves", data_path, served, WAKE, is_ours=True),
        Subject("kvpipe, server apart", data_path, apart, WAKE, is_ours=True),
    ]


def lookup_inserts() -> list[Subject]:
    """A LookupBuffer within one process, beside numpy's copy into new memory."""
    program = ours("lookup_inserts", roles=("alone",))
    return [
        Subject("kvpipe insert", "", program, INSERT, (("by", "insert"),), is_ours=True),
        Subject("numpy copy", "", program, INSERT, (("by", "copy"),)),
    ]


def kvpipe_store(data_path: str) -> list[Subject]:
    """The store server of kvpipe, used by one thread, and by four that share a connection."""
    program = ours("store_values", env=data_path_env(data_path), roles=("client", "server"))
    apart = ours("store_values", env=data_path_env(data_path), roles=("consumer", "producer", "server"))
    return [
        Subject("kvpipe store", data_path, program, VALUES | EXISTS, (("threads", "1"),), is_ours=True),
        Subject("kvpipe store, 4 threads", data_path, program, VALUES, (("threads", "4"),), is_ours=True),
        Subject("kvpipe store", data_path, apart, WAKE, is_ours=True),
    ]


def pipe_beside_store(data_path: str) -> list[Subject]:
    """A Pipe, which moves as many bytes as a store does in one direction."""
    options = (("into", "out"), ("way", "checked"), *IN_FLIGHT)
    return [Subject("kvpipe Pipe", data_path, ours("pipe_tensors", env=data_path_env(data_path)), VALUES, options)]


def other_stores() -> list[Subject]:
    """Stores in which kvpipe is the client only."""
    return [*_on_server("Redis"), _redis_keeping_memory(), *_on_server("Valkey"), *lmcache()]


def program_missing(program: str) -> str:
    """Why a server cannot take part: its program is not there; empty if it is."""
    return "" if shutil.which(program) else f"{program} is not installed; scripts/servers fetches it"


def _on_server(name: str) -> list[Subject]:
    """What uses a Redis or Valkey server."""
    server = f"{name.lower()}-server"
    setup: Pairs = (("server", server),)
    found = [*_stores_of(name, "redis_server", setup), *_clients_of(name, setup)]
    return [replace(one, missing=program_missing(server)) for one in found]


def _redis_keeping_memory() -> Subject:
    """Four threads on Redis. Its allocator is jemalloc, that of Valkey is another one here."""
    program = ours("store_values", (("server", "redis-server"),), _KEEPING_MEMORY, ("client", "redis_server"))
    name, threads = "Redis keeping memory, 4 threads", (("threads", "4"),)
    return Subject(name, "", program, VALUES, threads, is_ours=True, missing=program_missing("redis-server"))


def _stores_of(name: str, server: str, setup: Pairs = ()) -> list[Subject]:
    """A store, used by one thread and by four, and by a consumer that waits."""
    client = ours("store_values", setup, roles=("client", server))
    apart = ours("store_values", setup, roles=("consumer", "producer", server))
    return [
        Subject(name, "", client, VALUES | EXISTS, (("threads", "1"),), is_ours=True),
        Subject(f"{name}, 4 threads", "", client, VALUES, (("threads", "4"),), is_ours=True),
        Subject(name, "", apart, WAKE, is_ours=True),
    ]


def _clients_of(name: str, setup: Pairs) -> list[Subject]:
    """Other clients of a server."""
    clients = {"redis-py": "client", "redis-benchmark, 4 connections": "benchmark"}
    return [
        Subject(f"{client}, {name}", "", ours("redis_values", setup, roles=(role, "server")), VALUES)
        for client, role in clients.items()
    ]


def lmcache() -> list[Subject]:
    """LMCache's C++ client for Redis, with its default of eight connections and with one; and its `lm://` server."""
    python = os.environ.get(LMCACHE_PYTHON) or sys.executable
    command = (python, *_PROGRAMS, "lmcache_values")
    redis = [
        Program(
            "lmcache_values",
            command,
            ("redis_client", "redis_server"),
            (("connections", connections), ("server", "redis-server")),
        )
        for connections in ("1", "8")
    ]
    server = Program("lmcache_values", command, ("server_client", "server"))
    return [
        Subject("LMCache on Redis, 1 connection", "", redis[0], VALUES),
        Subject("LMCache on Redis, 8 connections", "", redis[1], VALUES | EXISTS),
        Subject("LMCache, lm:// server", "", server, VALUES | EXISTS),
    ]


def bare(data_path: str) -> list[Subject]:
    """UCX without kvpipe: `rust/ucx/examples/bare_loop`."""
    if data_path != "default":
        return []
    return [Subject("bare UCX, a get a block", data_path, _bare(env=_LOOPBACK), BLOCKS)]


def ucx_perftest(data_path: str) -> list[Subject]:
    """UCX's own benchmark, with the settings of kvpipe."""
    tool = Perftest((*_LOOPBACK, *_ONE_SIDED, *_TUNED_TCP, *ucx_env(data_path)))
    messages = (("test", "ucp_am_bw"),)
    reads = (("test", "ucp_get"), ("in_flight", "4"))
    streams = messages if data_path == "tcp" else reads
    latency = (("test", "ucp_am_lat"),)
    return [
        Subject("ucx_perftest (hot)", data_path, tool, TENSORS, streams, fits=_is_large),
        Subject("ucx_perftest -E sleep", data_path, tool, LATENCY, (*latency, ("wait", "sleep"))),
        Subject("ucx_perftest", data_path, tool, LATENCY, latency),
    ]


def _is_large(case: Case) -> bool:
    """Larger than eager messages: kvpipe sends smaller tensors in messages, so single reads are not comparable."""
    return case.num_bytes > _EAGER_CAP


def require_gpu(device: str) -> None:
    """Checks that tensors can be moved on a GPU.

    Raises:
        TransportUnavailableError: They cannot.
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


def kvpipe_gpu(data_path: str, device: str, sizes: Pairs) -> list[Subject]:
    """A Pipe between tensors on a GPU, in place; an Agent that reads blocks of these sizes; loads of handoffs."""
    setup, env = (("device", device), *sizes), _gpu_env(data_path)
    pipe, agent = ours("gpu_tensors", setup, env), ours("gpu_blocks", setup, env)
    handoffs = [
        Subject(
            f"kvpipe handoff, {integrity}",
            data_path,
            ours("handoff_blocks", (("integrity", integrity), *setup), env),
            BLOCKS,
        )
        for integrity in ("validate", "checksum")
    ]
    return [
        Subject("kvpipe out= on the GPU", data_path, pipe, TENSORS, _GPU_IN_FLIGHT, is_ours=True),
        Subject("kvpipe", data_path, agent, BLOCKS, _GPU_IN_FLIGHT, is_ours=True),
        *(replace(handoff, is_ours=True) for handoff in handoffs),
    ]


def torch_gather(device: str, sizes: Pairs) -> list[Subject]:
    """Torch's copies of blocks within one process."""
    program = ours("gpu_blocks", (("device", device), *sizes), roles=("gather",))
    return [Subject("torch gather", "", program, BLOCKS)]


def ucx_perftest_gpu(data_path: str) -> list[Subject]:
    """UCX's own benchmark between buffers on a GPU, read as kvpipe reads them; TCP has no remote reads."""
    if data_path == "tcp":
        return []
    tool = Perftest((*_LOOPBACK, *_ONE_SIDED, ("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "on")))
    reads = (("test", "ucp_get"), ("in_flight", "4"), ("memory", "cuda"))
    return [Subject("ucx_perftest -m cuda (hot)", data_path, tool, TENSORS, reads)]


def nixl(data_path: str) -> list[Subject]:
    """NIXL, READ and WRITE; over TCP as it ships and with UCX's segments as kvpipe sets them."""
    tunings: dict[str, Pairs] = {"": (), ", tuned segments": _TUNED_TCP} if data_path == "tcp" else {"": ()}
    return [
        Subject(f"NIXL {op}{name}", data_path, _peer("nixl_blocks", (("op", op),), (*env, *ucx_env(data_path))), BLOCKS)
        for name, env in tunings.items()
        for op in ("READ", "WRITE")
    ]


def mooncake() -> list[Subject]:
    """Mooncake's transfer engine, which has TCP and RDMA."""
    libraries = ROOT / ".venv-peers/lib-system"
    path = ":".join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]))
    env = (("LD_LIBRARY_PATH", path), ("GLOG_minloglevel", "2"))
    return [
        Subject(f"Mooncake {op}", "tcp", _peer("mooncake_blocks", (("op", op),), env), BLOCKS)
        for op in ("READ", "WRITE")
    ]


def ucxx(data_path: str) -> list[Subject]:
    """RAPIDS' ucxx with its defaults, and with kvpipe's UCX settings; its blocking mode has the lowest latency."""
    kinds, env = TENSORS | LATENCY, ucx_env(data_path)
    tuned = (*_ONE_SIDED, *_TUNED_TCP, *env)
    blocking = (*tuned, ("UCXPY_PROGRESS_MODE", "blocking"))
    return [
        Subject("ucxx", data_path, _peer("ucxx_tensors", env=env), kinds, IN_FLIGHT),
        Subject("ucxx, tuned", data_path, _peer("ucxx_tensors", env=tuned), kinds, IN_FLIGHT),
        Subject("ucxx, tuned, blocking", data_path, _peer("ucxx_tensors", env=blocking), LATENCY),
    ]


def zeromq() -> list[Subject]:
    """ZeroMQ over both of its transports between processes."""
    data_paths = {"ipc": "default", "tcp": "tcp"}
    return [
        Subject(f"ZeroMQ {name}", data_path, _peer("zmq_tensors", (("endpoint", name),)), TENSORS | LATENCY)
        for name, data_path in data_paths.items()
    ]


def gloo() -> list[Subject]:
    """torch.distributed on CPUs; with the torch of kvpipe's own environment."""
    return [Subject("gloo", "tcp", ours("gloo_tensors"), TENSORS | LATENCY, IN_FLIGHT)]


def peers(data_path: str) -> list[Subject]:
    """All subjects of a data path except kvpipe, memcpy and bare UCX."""
    both = [*ucx_perftest(data_path), *nixl(data_path), *ucxx(data_path)]
    return [*both, *(one for one in (*mooncake(), *zeromq(), *gloo()) if one.data_path == data_path)]


def ours(name: str, setup: Pairs = (), env: Pairs = (), roles: Sequence[str] = ("active", "passive")) -> Program:
    """A program that runs in this environment."""
    command = (sys.executable, *_PROGRAMS, name)
    return Program(name, command, tuple(roles), setup, env)


def _peer(name: str, setup: Pairs = (), env: Pairs = ()) -> Program:
    python = os.environ.get("KVPIPE_BENCH_PEERS_PYTHON") or ROOT / ".venv-peers/bin/python"
    if not Path(python).exists():
        python = sys.executable
    command = (str(python), *_PROGRAMS, name)
    return Program(name, command, setup=setup, env=(*_LOOPBACK, *env), is_paused=True)


def _bare(env: Pairs = (), roles: Sequence[str] = ("active", "passive"), setup: Pairs = ()) -> Program:
    target = Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target")
    wheel = ucx_wheel_dir()
    library = (("KVPIPE_UCX_LIB", f"{wheel}/lib/libucp.so.0"),) if wheel and "KVPIPE_UCX_LIB" not in os.environ else ()
    command = (str(target / "release/examples/bare_loop"),)
    return Program("bare_loop", command, tuple(roles), setup, env=(*library, *env))


REMEDIES = {
    "bare_loop": "cargo build --release --example bare_loop -p kvpipe-ucx, or make bench",
    "gloo_tensors": "install torch",
    "nixl_blocks": "make bench-peers",
    "ucxx_tensors": "make bench-peers",
    "zmq_tensors": "make bench-peers",
    "mooncake_blocks": "make bench-peers",
    "lmcache_values": f"{LMCACHE_PYTHON} names the Python of an environment with LMCache",
}


def reason(subject: Subject, error: SubjectError) -> str:
    """Why a subject is left out, with a remedy if it is not installed."""
    text = str(error)
    is_missing = "ModuleNotFoundError" in text or "ImportError" in text or "cannot start" in text
    remedy = REMEDIES.get(getattr(subject.program, "name", ""))
    return f"{text} ({remedy})" if is_missing and remedy else text
