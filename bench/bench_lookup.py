"""LookupBuffer: how long a waiting `drop_select` takes after an insert, and an insert beside a copy; see README.md."""

import argparse
import json
import statistics
import subprocess
import sys
import time

import numpy as np

import kvpipe

TOKENS = np.arange(4)
WARM_UP = 50
LARGE = 64 << 20


def take(address: str, rounds: int) -> None:
    """The consumer's process: says how long after the insert began it had each entry."""
    buffer = kvpipe.LookupBuffer.connect(address)
    print("ready", flush=True)
    took_us = []
    for _ in range(rounds):
        key = buffer.drop_select(None, None)[2]
        took_us.append((time.monotonic_ns() - int(key[0])) / 1e3)
    print(json.dumps(took_us[WARM_UP:]), flush=True)


def serve() -> None:
    """A server of its own."""
    buffer = kvpipe.LookupBuffer()
    buffer.serve()
    print(buffer.address, flush=True)
    sys.stdin.read()


def start(*arguments: str) -> subprocess.Popen[str]:
    """This program in another process."""
    command = [sys.executable, __file__, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ourselves


def wake(producer: kvpipe.LookupBuffer, address: str, rounds: int) -> str:
    """Inserts small entries that a consumer in another process waits for."""
    consumer = start("take", address, str(rounds + WARM_UP))
    consumer.stdout.readline()
    for _ in range(rounds + WARM_UP):
        time.sleep(0.005)  # it sleeps by then
        producer.insert(TOKENS, None, np.array([time.monotonic_ns()]), None, None)
    took_us = json.loads(consumer.stdout.readline())
    consumer.kill()
    deciles = statistics.quantiles(took_us, n=10)
    return f"{statistics.median(took_us):.0f} us ({deciles[0]:.0f}-{deciles[-1]:.0f})"


def insert_beside_copy(rounds: int) -> str:
    """An insert of 64 MiB in one process, and numpy's copy of the same, alternating."""
    buffer, key = kvpipe.LookupBuffer(), np.ones(LARGE, np.uint8)
    inserts, copies = [], []
    for _ in range(rounds):
        began = time.perf_counter()
        buffer.insert(TOKENS, None, key, None, None)
        inserted = time.perf_counter()
        copy = key.copy()
        copies.append(time.perf_counter() - inserted)
        inserts.append(inserted - began)
        del copy
        buffer.drop_select(None, None)
    insert_s, copy_s = statistics.median(inserts), statistics.median(copies)
    return f"insert {insert_s * 1e3:.1f} ms, copy {copy_s * 1e3:.1f} ms, ratio {insert_s / copy_s:.2f}"


def measure(rounds: int) -> None:
    """Prints all figures."""
    with kvpipe.LookupBuffer() as buffer:
        buffer.serve()
        print("wake, producer serves:  ", wake(buffer, buffer.address, rounds))
    server = start("serve")
    address = server.stdout.readline().strip()
    with kvpipe.LookupBuffer.connect(address) as producer:
        print("wake, server of its own:", wake(producer, address, rounds))
    server.kill()
    print("64 MiB:                 ", insert_beside_copy(max(5, rounds // 25)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["take"]:
        take(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["serve"]:
        serve()
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--rounds", type=int, default=500)
        measure(parser.parse_args().rounds)
