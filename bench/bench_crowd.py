"""Agents of several processes that connect to one agent at one instant: `python -m bench.bench_crowd --agents 300`.

With `--strangers 300`, as many connections of those who do not have the token come at the same instant.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import socket
import statistics
import threading
import time
from multiprocessing import Queue
from threading import Barrier
from typing import Any

from kvpipe import Agent, KVPipeError

GARBAGE = b"GET / HTTP/1.1\r\n\r\n"


def send_garbage(address: str, count: int) -> list[socket.socket]:
    """Connects so often without the token; every other connection sends garbage, the others nothing."""
    host, port = address.rsplit(":", 1)
    strangers = [socket.create_connection((host, int(port))) for _ in range(count)]
    for stranger in strangers[::2]:
        stranger.send(GARBAGE)
    return strangers


def crowd(address: str, count: int, num_strangers: int, barrier: Barrier, results: Queue[Any]) -> None:
    """One process: makes its agents, waits for the others, and has all of its agents and strangers connect."""
    agents = [Agent() for _ in range(count)]
    times: list[float] = []
    errors: list[str] = []

    def connect(agent: Agent) -> None:
        try:
            agent.connect(address)
            times.append(time.monotonic())
        except KVPipeError as error:
            errors.append(f"{type(error).__name__}: {error}")

    strangers: list[socket.socket] = []
    threads = [threading.Thread(target=connect, args=(agent,)) for agent in agents]
    threads.append(threading.Thread(target=lambda: strangers.extend(send_garbage(address, num_strangers))))
    barrier.wait()
    barrier.wait()
    begun_cpu = time.process_time()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put((times, errors, time.process_time() - begun_cpu))
    barrier.wait()
    for stranger in strangers:
        stranger.close()


def main() -> None:
    """Prints how many got in and when, and what CPU time that took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--agents", type=int, default=300)
    parser.add_argument("--strangers", type=int, default=0, help="connections without the token; default 0")
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(options.processes + 1), spawn.Queue()
    with Agent() as hub:
        counts = (options.agents // options.processes, options.strangers // options.processes)
        arguments = (hub.address, *counts, barrier, results)
        processes = [spawn.Process(target=crowd, args=arguments) for _ in range(options.processes)]
        for process in processes:
            process.start()
        barrier.wait()
        time.sleep(1)  # until the agents that were just made are idle
        begun, begun_cpu = time.monotonic(), time.process_time()
        barrier.wait()
        outcomes = [results.get() for _ in processes]
        hub_cpu_s, crowd_cpu_s = time.process_time() - begun_cpu, sum(cpu_s for _, _, cpu_s in outcomes)
        times = [at - begun for times, _, _ in outcomes for at in times]
        errors = [error for _, errors, _ in outcomes for error in errors]
        print(f"{len(times)} of {len(times) + len(errors)} agents connected; load average {os.getloadavg()[0]:.1f}")
        print(f"median {statistics.median(times):.2f} s, last {max(times):.2f} s")
        print(f"CPU: {hub_cpu_s:.2f} s of the one that is connected to, {crowd_cpu_s:.2f} s of the crowd")
        for error in sorted(set(errors))[:3]:
            print(error)
        barrier.wait()
        for process in processes:
            process.join()


if __name__ == "__main__":
    main()
