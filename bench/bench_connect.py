"""Connecting until the first block is here, beside NIXL: `make bench-peers`, then `python -m bench.bench_connect`.

Each round makes one agent of each kind, and times from the address (NIXL: the metadata) of a peer that runs already
until one block of 64 KiB is here. Making the agent is not timed. Both go over loopback TCP.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from bench.checkout import ROOT, python_path

PEERS = os.environ.get("KVPIPE_BENCH_PEERS_PYTHON") or str(ROOT / ".venv-peers" / "bin" / "python")
SIZE = 64 << 10
MEMORY = "DRAM"


def report(elapsed: float, into: np.ndarray[Any, Any]) -> None:
    """Prints the time of a round whose block has come."""
    if not into.all():
        sys.exit("the block has not come")
    print(elapsed, flush=True)


def kvpipe_there() -> None:
    """Exposes a block until its standard input ends."""
    from kvpipe import Agent  # noqa: PLC0415 - NIXL's environment has no kvpipe

    with Agent() as agent:
        agent.register(np.ones((1, SIZE), np.uint8), "kv", SIZE)
        print(agent.address, flush=True)
        sys.stdin.read()


def kvpipe_here() -> None:
    """A round for each line."""
    from kvpipe import Agent  # noqa: PLC0415

    for line in sys.stdin:
        with Agent() as agent:
            into: np.ndarray[Any, Any] = np.zeros((1, SIZE), np.uint8)
            region, begun = agent.register(into, "here", SIZE), time.perf_counter()
            agent.connect(line.strip()).read_blocks(region, [0], "kv", [0]).wait(10)
            elapsed = time.perf_counter() - begun
        report(elapsed, into)


def nixl_agent(name: str, buffer: np.ndarray[Any, Any]) -> Any:
    """An agent of NIXL's with a registered buffer, without its progress thread, which slows it."""
    import nixl  # noqa: PLC0415

    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))
    agent.register_memory([(buffer.ctypes.data, SIZE, 0, "")], MEMORY)
    return agent


def nixl_there() -> None:
    """The same of NIXL; without its polling no read of TCP ends."""
    buffer: np.ndarray[Any, Any] = np.ones(SIZE, np.uint8)
    agent = nixl_agent("there", buffer)
    print(f"{agent.get_agent_metadata().hex()} {buffer.ctypes.data}", flush=True)
    while True:
        agent.get_new_notifs()


def nixl_here() -> None:
    """A round for each line."""
    for number, line in enumerate(sys.stdin):
        metadata, address = line.split()
        into: np.ndarray[Any, Any] = np.zeros(SIZE, np.uint8)
        agent, begun = nixl_agent(f"here-{number}", into), time.perf_counter()
        agent.add_remote_agent(bytes.fromhex(metadata))
        ours = agent.get_xfer_descs([(into.ctypes.data, SIZE, 0)], MEMORY)
        theirs = agent.get_xfer_descs([(int(address), SIZE, 0)], MEMORY)
        handle = agent.initialize_xfer("READ", ours, theirs, "there")
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        elapsed = time.perf_counter() - begun
        report(elapsed, into)


def begin(python: str, role: str, environment: dict[str, str]) -> Any:
    """Another process of this program."""
    command, pipe = [python, "-m", "bench.bench_connect", role], subprocess.PIPE
    variables = os.environ | {"PYTHONPATH": python_path()} | environment
    return subprocess.Popen(command, env=variables, stdin=pipe, stdout=pipe, text=True)  # noqa: S603


def main() -> None:
    """Prints medians, and the range."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    ours = {"KVPIPE_TOKEN": "a token that both sides have", "KVPIPE_DATA_PATH": "tcp"}
    subjects = {
        "kvpipe, sealed": (sys.executable, "kvpipe", ours | {"KVPIPE_ENCRYPTION": "on"}),
        "kvpipe, plain": (sys.executable, "kvpipe", ours | {"KVPIPE_ENCRYPTION": "off"}),
        "NIXL READ, UCX over TCP": (PEERS, "nixl", {"UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "ERROR"}),
    }
    sides: dict[str, tuple[Any, Any, str]] = {}
    times: dict[str, list[float]] = {name: [] for name in subjects}
    for name, (python, kind, environment) in subjects.items():
        there, here = (begin(python, f"{kind}_{side}", environment) for side in ("there", "here"))
        sides[name] = there, here, there.stdout.readline()
    for _ in range(rounds + 1):
        for name, (_, here, address) in sides.items():
            here.stdin.write(address)
            here.stdin.flush()
            times[name].append(float(here.stdout.readline()) * 1e3)
    for name, (there, here, _) in sides.items():
        measured = sorted(times[name][1:])
        print(f"{name}: {statistics.median(measured):.2f} ms ({measured[0]:.2f} to {measured[-1]:.2f})")
        there.kill()
        here.kill()


if __name__ == "__main__":
    roles = {role.__name__: role for role in (kvpipe_there, kvpipe_here, nixl_there, nixl_here)}
    roles[sys.argv[1]]() if sys.argv[1:2] and sys.argv[1] in roles else main()
