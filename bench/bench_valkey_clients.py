"""SET and GET of large values: kvpipe's RESP client and ValkeyStore beside redis-py and valkey-glide, in turn.

Starts a redis-server or valkey-server of its own. Prints the median of GB/s over the rounds, with the lowest and
highest, then wake-up and question times of a store.

    python bench/bench_valkey_clients.py [--num-bytes 4194304] [--rounds 7]
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import redis

from kvpipe import _kvpipe
from kvpipe.store.valkey import ValkeyStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NUM_VALUES = 64
Subject = tuple["Callable[[int], object]", "Callable[[int], object]"]


@contextlib.contextmanager
def server() -> Iterator[int]:
    """A server on a free port."""
    program = shutil.which("valkey-server") or shutil.which("redis-server")
    if program is None:
        message = "neither valkey-server nor redis-server was found"
        raise SystemExit(message)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        options = ["--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", "", "--appendonly", "no"]
        process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL)  # noqa: S603 - found above
        try:
            time.sleep(1)
            yield port
        finally:
            process.kill()
            process.wait()


def native(port: int, data: bytearray, num_connections: int, num_parts: int) -> Subject:
    """The RESP client: each value in parts over all connections."""
    connections = [_kvpipe.RespConnection("127.0.0.1", port, 10) for _ in range(num_connections)]
    out = bytearray(len(data))
    size = len(data) // num_parts

    def parts(number: int) -> list[tuple[bytes, int]]:
        return [(b"native:%d:%d:%d" % (num_parts, number, part), size) for part in range(num_parts)]

    def write(number: int) -> None:
        _kvpipe.RespConnection.write_parts(connections, data, parts(number), 600_000)

    def read(number: int) -> None:
        _kvpipe.RespConnection.read_parts(connections, out, parts(number))

    return write, read


def store_of(port: int, data: bytearray, query: str) -> tuple[ValkeyStore, Subject]:
    """ValkeyStore: reservation, checksums and commit included."""
    store = ValkeyStore.open(f"redis://127.0.0.1:{port}/0?{query}")
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


def redis_py(port: int, data: bytearray) -> Subject:
    """redis-py with hiredis; any thread has a connection."""
    client = redis.Redis(port=port)
    value = bytes(data)
    return (lambda number: client.set(b"py:%d" % number, value), lambda number: client.get(b"py:%d" % number))


def glide(port: int, data: bytearray) -> Subject | None:
    """valkey-glide, if it is installed."""
    try:
        import glide_sync  # noqa: PLC0415 - optional
    except ImportError:
        return None
    address = glide_sync.NodeAddress("127.0.0.1", port)
    client = glide_sync.GlideClient.create(glide_sync.GlideClientConfiguration([address], request_timeout=10_000))
    value = bytes(data)
    return (lambda number: client.set(b"glide:%d" % number, value), lambda number: client.get(b"glide:%d" % number))


def run(operation: Callable[[int], object], num_bytes: int, num_threads: int) -> float:
    """GB/s of all values, by so many callers."""
    began_s = time.perf_counter()
    if num_threads == 1:
        for number in range(NUM_VALUES):
            operation(number)
    else:
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(operation, range(NUM_VALUES)))
    return NUM_VALUES * num_bytes / (time.perf_counter() - began_s) / 1e9


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


def exists_ms(store: ValkeyStore, num_times: int = 50) -> list[float]:
    """Milliseconds of a question about 1,000 keys, half of them present."""
    for number in range(500):
        store.put(b"exists:%d" % number, b"x")
    keys = [b"exists:%d" % number for number in range(1000)]
    times = []
    for _ in range(num_times):
        began = time.perf_counter()
        store.exists(keys)
        times.append((time.perf_counter() - began) * 1e3)
    return times


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-bytes", type=int, default=4 << 20)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    data = bytearray(range(256)) * (arguments.num_bytes // 256)
    with server() as port:
        striped, store = store_of(port, data, "prefix=b4")
        quarters, in_quarters = store_of(port, data, f"prefix=bq&part_bytes={len(data) // 4}")
        subjects: dict[str, tuple[Subject | None, int]] = {
            "resp, 1 connection": (native(port, data, 1, 1), 1),
            "resp, 4 connections, 4 parts": (native(port, data, 4, 4), 1),
            "ValkeyStore, 1 caller": (store, 1),
            "ValkeyStore, 4 callers": (store, 4),
            "ValkeyStore, 1 caller, 4 parts": (in_quarters, 1),
            "redis-py, 1 connection": (redis_py(port, data), 1),
            "redis-py, 4 connections": (redis_py(port, data), 4),
            "glide-sync, 1 caller": (glide(port, data), 1),
            "glide-sync, 4 callers": (glide(port, data), 4),
        }
        rates: dict[tuple[str, str], list[float]] = {}
        for turn in range(arguments.rounds + 1):
            for name, (subject, num_threads) in subjects.items():
                for operation, call in zip(("SET", "GET"), subject or (), strict=False):
                    rate = run(call, len(data), num_threads)
                    if turn:  # the first round warms up
                        rates.setdefault((name, operation), []).append(rate)
        for (name, operation), found in rates.items():
            spread = f"{min(found):.2f} to {max(found):.2f}"
            print(f"{name:32} {operation} {statistics.median(found):5.2f} GB/s  ({spread})")
        other, _ = store_of(port, data, "prefix=b4")
        waking, asking = wake_us(striped, other), exists_ms(striped)
        for name, times, unit in (("wake", waking, "us"), ("exists(1000)", asking, "ms")):
            worst = sorted(times)[-max(1, len(times) // 100)]
            print(f"{name:32} p50 {statistics.median(times):.2f} {unit}, p99 {worst:.2f}")
        for opened in (striped, quarters, other):
            opened.close()


if __name__ == "__main__":
    main()
