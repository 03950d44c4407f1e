"""What waiting requests cost: `python -m bench.bench_leases`.

In one state P keeps blocks for a consumer that never comes, in another D waits for a handoff of an unknown id. Neither
instance computes anything. The table has the CPUs that each process uses meanwhile, the time of 120 tokens of another
instance on the same machine, and the time of a one-token request that P gets. The baseline is the state `idle`.

`--against CHECKOUT` measures another checkout of kvpipe, too, and `--nixl` NixlConnector. They alternate by rounds, and
instances that are not measured are stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import secrets
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from bench import machine
from bench.checkout import ROOT
from bench.handoff import client
from bench.instances.model import random_prompt, write_model
from bench.instances.servers import Server, ServerPool, resumed
from bench.instances.vllm import (
    MODEL,
    NIXL_PRODUCE,
    TOKEN,
    kvpipe_transfer,
    nixl_env,
    nixl_transfer,
    nixl_unavailable_reason,
    start_instance,
)
from bench.report import markdown
from kvpipe.control import ControlClient
from kvpipe.launch.ports import free_ports
from kvpipe.launch.spec import LOOPBACK
from kvpipe.transfer_params import consume, produce

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ARGS = ["--max-model-len", "1024", "--num-gpu-blocks-override", "64", "--max-num-batched-tokens", "1024"]
PROMPT_TOKENS = 256
NEIGHBOUR_TOKENS = 120
SHORT_TOKENS, NUM_SHORT = 16, 20
# Longer than a measurement.
WAIT_S = 3600
# vLLM's workers spin for a second after each step.
SETTLE_S = 3
PARTS = ("workers", "EngineCores", "API servers")
STATES = ("idle", "a lease", "an unknown id")


@dataclass
class Subject:
    """An instance that produces, and one that consumes.

    Attributes:
        name: Name of its connector.
        prefill: The instance that produces.
        decode: The instance that consumes; `None` where waiting for an unknown id is not possible.
        control: The control port of `prefill`; empty with NixlConnector.
    """

    name: str
    prefill: Server
    decode: Server | None
    control: str

    @property
    def servers(self) -> list[Server]:
        """Its instances."""
        return [self.prefill, *([self.decode] if self.decode else [])]

    @contextlib.contextmanager
    def in_state(self, state: str) -> Iterator[Server]:
        """Has an instance wait inside the block, and yields it."""
        handoff, prompt = secrets.token_hex(16), random_prompt(PROMPT_TOKENS, secrets.token_hex(4))
        if state == "a lease":
            params = produce(handoff) if self.control else NIXL_PRODUCE
            client.prefill(self.prefill.url, prompt, kv_transfer_params=params)
            yield self.prefill
            if self.control:
                with contextlib.closing(ControlClient(TOKEN)) as control:
                    control.release(self.control, handoff).wait()
        elif state == "an unknown id" and self.decode is not None:
            body = {"model": MODEL, "prompt": prompt, "kv_transfer_params": consume(handoff, self.control)}
            connection = http.client.HTTPConnection(urlsplit(self.decode.url).netloc)
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            yield self.decode
            connection.close()
        else:
            yield self.prefill


@dataclass
class Samples:
    """Measurements of one subject in one state.

    Attributes:
        cpus: CPUs used by each part of the instance, one list for each part.
        neighbour_s: Seconds of the other instance's tokens.
        short_s: Seconds of requests to the instance.
    """

    cpus: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    neighbour_s: list[float] = field(default_factory=list)
    short_s: list[float] = field(default_factory=list)


def start_kvpipe(pool: ServerPool, work: Path, name: str, checkout: Path) -> Subject:
    """Starts a prefill and a decode instance with the connector of a checkout."""
    ports = free_ports(2)
    controls = [f"{LOOPBACK}:{port}" for port in ports]
    more = {"lease_s": str(WAIT_S), "open_timeout_s": str(WAIT_S), "handoff_timeout_s": str(WAIT_S)}
    servers = [
        start_instance(
            pool,
            work,
            f"{name} {part}",
            ARGS,
            transfer=kvpipe_transfer(role, control, **more),
            env=_env() | {"PYTHONPATH": str(checkout / "python")},
        )
        for part, role, control in zip(("prefill", "decode"), ("kv_producer", "kv_consumer"), controls, strict=True)
    ]
    return Subject(name, servers[0], servers[1], controls[0])


def start_nixl(pool: ServerPool, work: Path, folder: Path) -> Subject:
    """Starts a prefill instance with NixlConnector. Its lease lasts for 480 s and cannot be released."""
    (port,) = free_ports(1)
    transfer = nixl_transfer("NixlPullConnector", "kv_producer", 1)
    server = start_instance(pool, work, "nixl prefill", ARGS, transfer=transfer, env=_env() | nixl_env(folder, port))
    return Subject("NixlConnector", server, None, "")


def start_subjects(pool: ServerPool, work: Path, options: argparse.Namespace) -> list[Subject]:
    """Starts and stops all subjects, one after the other."""
    starts: list[Callable[[], Subject]] = [lambda: start_kvpipe(pool, work, "kvpipe", ROOT)]
    if options.against:
        starts.append(lambda: start_kvpipe(pool, work, "kvpipe before", options.against))
    if options.nixl:
        starts.append(lambda: start_nixl(pool, work, options.nixl))
    subjects = []
    for start in starts:
        subjects.append(start())
        with resumed(subjects[-1].servers):
            for server in subjects[-1].servers:
                server.until_healthy()
    return subjects


def _env() -> dict[str, str]:
    return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


def measure_states(
    subject: Subject, neighbour: Server, seconds: float, samples: dict[tuple[str, str], Samples]
) -> None:
    """Measures an instance of a subject in each state that it can have."""
    for state in STATES:
        if state == "an unknown id" and subject.decode is None:
            continue
        with subject.in_state(state) as server:
            measure(server, neighbour, seconds, samples[subject.name, state])


def measure(server: Server, neighbour: Server, seconds: float, samples: Samples) -> None:
    """Measures an instance that waits."""
    time.sleep(SETTLE_S)
    before, began_s = server.cpu_s_by_part(), time.monotonic()
    time.sleep(seconds)
    took_s = time.monotonic() - began_s
    after = server.cpu_s_by_part()
    for part, values in samples.cpus.items():
        values.append((after[part] - before[part]) / took_s)
    began_s = time.monotonic()
    client.stream(neighbour.url, random_prompt(SHORT_TOKENS, secrets.token_hex(4)), max_tokens=NEIGHBOUR_TOKENS)
    samples.neighbour_s.append(time.monotonic() - began_s)
    for _ in range(NUM_SHORT):
        time.sleep(0.05)
        began_s = time.monotonic()
        client.prefill(server.url, random_prompt(SHORT_TOKENS, secrets.token_hex(4)))
        samples.short_s.append(time.monotonic() - began_s)


def report(samples: dict[tuple[str, str], Samples]) -> str:
    """A table of medians."""
    rows = []
    for (subject, state), found in samples.items():
        if found.short_s:
            cpus = [f"{statistics.median(found.cpus[part]):.2f}" for part in PARTS]
            neighbour = f"{statistics.median(found.neighbour_s):.2f}"
            short = [f"{1000 * value:.1f}" for value in statistics.quantiles(found.short_s, n=10)]
            rows.append([subject, state, *cpus, neighbour, f"{short[4]} ({short[0]}-{short[8]})"])
    header = ["connector", "waits for", *(f"CPUs, {part}" for part in PARTS), "neighbour, s", "one token, ms"]
    return markdown(header, rows)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10, help="of CPU time for each state; default 10")
    parser.add_argument("--against", type=Path, help="another checkout of kvpipe, with its native part")
    parser.add_argument("--nixl", type=Path, help="folder with NIXL; adds NixlConnector")
    options = parser.parse_args()
    if options.nixl and (reason := nixl_unavailable_reason(options.nixl)):
        sys.exit(reason)
    with tempfile.TemporaryDirectory() as folder, ServerPool() as pool:
        work = Path(folder)
        write_model(work / "model", 4)
        neighbour = start_instance(pool, work, "neighbour", ARGS, env=_env())
        neighbour.until_healthy()
        subjects = start_subjects(pool, work, options)
        samples = {(subject.name, state): Samples() for subject in subjects for state in STATES}
        for number in range(options.rounds):
            for subject in subjects[:: 1 if number % 2 == 0 else -1]:
                with resumed(subject.servers):
                    measure_states(subject, neighbour, options.seconds, samples)
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
        print(report(samples))
        print(json.dumps(machine.machine()))


if __name__ == "__main__":
    main()
