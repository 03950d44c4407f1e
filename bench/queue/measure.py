"""The rounds of the benchmark: what dispatch through the broker takes, beside direct dispatch."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING

from bench.queue.load import Ask, ask_all
from bench.queue.results import PARTS, Sample

if TYPE_CHECKING:
    from bench.instances.servers import Server
    from bench.progress import Progress
    from bench.queue.deployment import Deployment

# More than one token: P alone answers a request for one.
_ANSWER_TOKENS = 8
_NUM_ALONE = 200
_STREAM_TOKENS = 100
# How the tables' notes call them.
LOAD = {"num_streams": 8, "gap_ms": 20, "at_once": 64}


def measure(
    deployment: Deployment, direct: Server, num_rounds: int, num_requests: int, progress: Progress
) -> tuple[list[Sample], list[Sample]]:
    """Measures rounds in which both take turns; returns the samples of direct dispatch, and of the broker."""
    [front] = deployment.fronts
    samples: dict[str, list[Sample]] = {direct.name: [], front.name: []}
    progress.expect(2 * (num_rounds + 1))
    for number in range(num_rounds + 1):
        progress.line(f"round {number} of {num_rounds}" if number else "a round to warm up")
        order = (direct, front) if number % 2 else (front, direct)
        for server in order:
            sample = _sample(deployment, server, num_requests)
            if number:
                samples[server.name].append(sample)
            progress.step(f"round {number}, {server.name}")
    progress.end()
    return samples[direct.name], samples[front.name]


def _sample(deployment: Deployment, server: Server, num_requests: int) -> Sample:
    alone = ask_all(server.url, [Ask(number, _ANSWER_TOKENS) for number in range(_NUM_ALONE)], 1)
    streams = [
        Ask(number, _STREAM_TOKENS, is_streamed=True, gap_ms=LOAD["gap_ms"]) for number in range(LOAD["num_streams"])
    ]
    delays_s = [delay_s for reply in ask_all(server.url, streams, len(streams)) for delay_s in reply.delays_s]
    before, begun_s = deployment.cpu_s(), time.monotonic()
    ask_all(server.url, [Ask(number, _ANSWER_TOKENS) for number in range(num_requests)], LOAD["at_once"])
    took_s, after = time.monotonic() - begun_s, deployment.cpu_s()
    own = PARTS[:1] if server is deployment.direct else PARTS[1:]
    cpu_us = {part: 1e6 * (after[part] - before[part]) / num_requests for part in own}
    figures = {
        "request": 1e3 * median(reply.took_s for reply in alone),
        "token": 1e6 * median(delays_s),
        "rate": num_requests / took_s,
        "CPU": sum(cpu_us.values()),
    }
    return Sample(figures, cpu_us)
