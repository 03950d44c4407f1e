"""SET and GET of large values: kvpipe's RESP client and ValkeyStore beside redis-py and valkey-glide, in turn.

Starts a redis-server or valkey-server of its own. Prints the medians of GB/s and of this process' CPU seconds per GiB
over the rounds, with the lowest and highest GB/s, then the times of a question and of a wake-up.

    python -m bench.bench_valkey_clients [--server redis-server] [--tls] [--num-bytes 4194304] [--rounds 7]
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import shutil
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from kvpipe import _kvpipe
from kvpipe.store.valkey import ValkeyStore
from tests.store.valkey_servers import Server, certificates, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import redis

NUM_VALUES = 64
Subject = tuple["Callable[[int], object]", "Callable[[int], object]"]


@contextlib.contextmanager
def server(program: str | None, *, is_tls: bool) -> Iterator[Server]:
    """A server on a free port."""
    found = shutil.which(program) if program else shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        message = f"{program or 'neither valkey-server nor redis-server'} was not found"
        raise SystemExit(message)
    with tempfile.TemporaryDirectory() as folder:
        tls = certificates(Path(folder)) if is_tls else None
        with running(found, Path(folder), tls=tls) as started:
            yield started


def native(at: Server, data: bytearray, num_connections: int, num_parts: int) -> Subject:
    """The RESP client: each value in parts over all connections."""
    tls = _kvpipe.RespTls(ca_file=at.tls.ca) if at.tls else None
    connections = [_kvpipe.RespConnection("127.0.0.1", at.port, 10, tls) for _ in range(num_connections)]
    out = bytearray(len(data))
    size = len(data) // num_parts

    def parts(number: int) -> list[tuple[bytes, int]]:
        return [(b"native:%d:%d:%d" % (num_parts, number, part), size) for part in range(num_parts)]

    def write(number: int) -> None:
        _kvpipe.RespConnection.write_parts(connections, data, parts(number), 600_000)

    def read(number: int) -> None:
        _kvpipe.RespConnection.read_parts(connections, out, parts(number))

    return write, read


def store_of(at: Server, data: bytearray, query: str) -> tuple[ValkeyStore, Subject]:
    """ValkeyStore: reservation, checksums and commit included."""
    store = ValkeyStore.open(at.url(query))
    out = bytearray(len(data))

    def write(number: int) -> None:
        key = b"%d" % number
        store.delete([key])
        store.put(key, data)

    def read(number: int) -> None:
        value = store.select(b"%d" % number)
        if value is not None:
            with value:
                value.read_into(out)

    return store, (write, read)


def library(at: Server) -> redis.Redis:
    """redis-py with hiredis; any thread has a connection."""
    return at.client(protocol=2)


def redis_py(at: Server, data: bytearray) -> Subject:
    """redis-py."""
    client = library(at)
    value = bytes(data)
    return (lambda number: client.set(b"py:%d" % number, value), lambda number: client.get(b"py:%d" % number))


def glide(at: Server, data: bytearray) -> Subject | None:
    """valkey-glide, if it is installed, without TLS."""
    if at.tls:
        return None
    try:
        import glide_sync  # noqa: PLC0415 - optional
    except ImportError:
        return None
    address = glide_sync.NodeAddress("127.0.0.1", at.port)
    client = glide_sync.GlideClient.create(glide_sync.GlideClientConfiguration([address], request_timeout=10_000))
    value = bytes(data)
    return (lambda number: client.set(b"glide:%d" % number, value), lambda number: client.get(b"glide:%d" % number))


def cpu_s() -> float:
    """CPU seconds of this process until now."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(operation: Callable[[int], object], num_bytes: int, num_threads: int) -> tuple[float, float]:
    """GB/s and CPU seconds per GiB of all values, by so many callers."""
    began_cpu_s = cpu_s()
    began_s = time.perf_counter()
    if num_threads == 1:
        for number in range(NUM_VALUES):
            operation(number)
    else:
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(operation, range(NUM_VALUES)))
    total_bytes = NUM_VALUES * num_bytes
    return total_bytes / (time.perf_counter() - began_s) / 1e9, (cpu_s() - began_cpu_s) / (total_bytes / 2**30)


def wake_us(writer: ValkeyStore, reader: ValkeyStore, num_times: int = 300) -> list[float]:
    """Microseconds from the call of commit until a take that waits returns."""
    times = []
    for number in range(num_times):
        key = b"wake:%d" % number
        ended = threading.Event()
        woken = [0.0]

        def wait(key: bytes = key, woken: list[float] = woken, ended: threading.Event = ended) -> None:
            lease = reader.take(key, timeout=10)
            woken[0] = time.perf_counter()
            if lease is not None:
                lease.acknowledge()
            ended.set()

        threading.Thread(target=wait).start()
        reservation = writer.reserve(key, 1000)
        if reservation is None:
            continue
        reservation.write(bytes(1000))
        time.sleep(0.005)
        began = time.perf_counter()
        reservation.commit()
        ended.wait(10)
        times.append((woken[0] - began) * 1e6)
    return times


def exists_ms(store: ValkeyStore, client: redis.Redis, num_times: int = 50) -> dict[str, list[float]]:
    """Milliseconds of a question about 1,000 keys, half of them present: of a store, and of redis-py alone, in turn."""
    for number in range(500):
        store.put(b"exists:%d" % number, b"x")
    keys = [b"exists:%d" % number for number in range(1000)]

    def ask_by_library() -> None:
        pipeline = client.pipeline(transaction=False)
        for key in keys:
            pipeline.hmget(b"b4:v:{%b}" % key, "e", "l")
        pipeline.execute()

    times: dict[str, list[float]] = {}
    for _ in range(num_times):
        for name, ask in (("ValkeyStore, exists(1000)", lambda: store.exists(keys)), ("redis-py", ask_by_library)):
            began = time.perf_counter()
            ask()
            times.setdefault(name, []).append((time.perf_counter() - began) * 1e3)
    return times


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-bytes", type=int, default=4 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--server", help="program, by default valkey-server or redis-server")
    parser.add_argument("--tls", action="store_true", help="with certificates that openssl makes")
    arguments = parser.parse_args()
    data = bytearray(range(256)) * (arguments.num_bytes // 256)
    with server(arguments.server, is_tls=arguments.tls) as at:
        striped, store = store_of(at, data, "prefix=b4")
        quarters, in_quarters = store_of(at, data, f"prefix=bq&part_bytes={len(data) // 4}")
        subjects: dict[str, tuple[Subject | None, int]] = {
            "resp, 1 connection": (native(at, data, 1, 1), 1),
            "resp, 4 connections, 4 parts": (native(at, data, 4, 4), 1),
            "ValkeyStore, 1 caller": (store, 1),
            "ValkeyStore, 4 callers": (store, 4),
            "ValkeyStore, 1 caller, 4 parts": (in_quarters, 1),
            "redis-py, 1 connection": (redis_py(at, data), 1),
            "redis-py, 4 connections": (redis_py(at, data), 4),
            "glide-sync, 1 caller": (glide(at, data), 1),
            "glide-sync, 4 callers": (glide(at, data), 4),
        }
        rates: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for turn in range(arguments.rounds + 1):
            for name, (subject, num_threads) in subjects.items():
                for operation, call in zip(("SET", "GET"), subject or (), strict=False):
                    rate = run(call, len(data), num_threads)
                    if turn:  # the first round warms up
                        rates.setdefault((name, operation), []).append(rate)
        for (name, operation), found in rates.items():
            speeds, costs = zip(*found, strict=True)
            spread = f"{min(speeds):.2f} to {max(speeds):.2f}"
            cost = f"{statistics.median(costs):.3f} CPU s/GiB"
            print(f"{name:32} {operation} {statistics.median(speeds):5.2f} GB/s  ({spread})  {cost}")
        other, _ = store_of(at, data, "prefix=b4")
        waking, asking = wake_us(striped, other), exists_ms(striped, library(at))
        found_times = [("wake", waking, "us"), *((name, times, "ms") for name, times in asking.items())]
        for name, times, unit in found_times:
            worst = sorted(times)[-max(1, len(times) // 100)]
            print(f"{name:32} p50 {statistics.median(times):.2f} {unit}, p99 {worst:.2f}")
        for opened in (striped, quarters, other):
            opened.close()


if __name__ == "__main__":
    main()
