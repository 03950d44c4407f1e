"""The rounds of the benchmark: one group runs at a time, the others are stopped."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench import trace
from bench.handoff import client, samples
from bench.handoff.subjects import GROUPS
from bench.instances.model import random_prompt
from bench.instances.servers import resumed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.handoff.subjects import Group, Setting, Subject, Times
    from bench.instances.servers import ServerPool

# For stopped processes to catch up with expired timers.
_SETTLE_S = 0.5
# vLLM's readers spin for a second after each message, on all available CPUs; measurements begin after that.
_QUIET_S = 1.2
_WARM_UP_TOKENS = 128
# The first requests of a length are slower, because they touch new memory.
_FIRST_ROUND = 0
_LEAST_ROUNDS = 3


@dataclass
class Measured:
    """A measured request, before the trace is read."""

    subject: str
    num_tokens: int
    asked: Times
    cpu_s: float
    clock: client.CpuClock | None


@dataclass
class Run:
    """Running groups and their measurements.

    Attributes:
        groups: The groups.
        measured: Measured requests.
        prefill_s: Seconds of one prompt computed by a group's prefill instance alone, by group.
        plain_s: The same without a handoff, for groups that support both; entries with one index are of one round.
        idle: Share of a CPU in per cent that each idle worker used, by server.
    """

    groups: list[Group]
    measured: list[Measured] = field(default_factory=list)
    prefill_s: dict[str, list[float]] = field(default_factory=dict)
    plain_s: dict[str, list[float]] = field(default_factory=dict)
    idle: dict[str, float] = field(default_factory=dict)

    def seconds_of_prefill(self, num_tokens: int) -> float:
        """Measures the first group's prefill for a prompt of this length."""
        group = self.groups[0]
        with resumed(group.servers):
            return group.prefill_once(random_prompt(num_tokens, f"probe {num_tokens}"))

    def rounds(self, num_tokens: int, num_rounds: int, end_at: float, *, times_prefill: bool) -> None:
        """Runs rounds over all subjects, each beginning with another group; after `end_at` only the first 3."""
        for number in range(num_rounds + 1):
            if number > _LEAST_ROUNDS and time.monotonic() > end_at:
                report(f"{num_tokens} tokens: the time has passed after {number - 1} rounds")
                return
            first = number % len(self.groups)
            for group in [*self.groups[first:], *self.groups[:first]]:
                with resumed(group.servers):
                    time.sleep(_SETTLE_S)
                    self._run_group(group, num_tokens, number, times_prefill=times_prefill)
            report(f"{num_tokens} tokens: round {number} of {num_rounds}")

    def _run_group(self, group: Group, num_tokens: int, number: int, *, times_prefill: bool) -> None:
        for subject in group.subjects:
            seed = f"{number} {subject.name} {num_tokens}"
            # Re-establishes sessions that broke while the group was stopped, for all subjects alike.
            subject.ask(random_prompt(_WARM_UP_TOKENS, f"warm {seed}"))
            time.sleep(_QUIET_S)
            measured = _measure(group, subject, random_prompt(num_tokens, seed))
            if number != _FIRST_ROUND:
                self.measured.append(measured)
        if times_prefill:
            self._time_prefill(group, num_tokens, number)

    def _time_prefill(self, group: Group, num_tokens: int, number: int) -> None:
        ways = [("prefill", group.prefill_once, self.prefill_s)]
        if group.plain_once is not None:
            ways.append(("plain", group.plain_once, self.plain_s))
        # Each one is first in every other round.
        for way, once, figures in ways[:: 1 if number % 2 else -1]:
            time.sleep(_QUIET_S)
            took_s = once(random_prompt(num_tokens, f"{number} {group.name} {way}"))
            if number != _FIRST_ROUND:
                figures.setdefault(group.name, []).append(took_s)

    def idle_workers(self, seconds: float) -> None:
        """Measures each group's workers without requests."""
        for group in self.groups:
            with resumed(group.servers):
                instances = [group.prefill, *([group.decode] if group.decode else [])]
                time.sleep(_SETTLE_S + _QUIET_S)
                before = [server.worker_cpu_s() for server in instances]
                time.sleep(seconds)
                for server, cpu_s in zip(instances, before, strict=True):
                    self.idle[server.name] = 100 * (server.worker_cpu_s() - cpu_s) / seconds

    def samples(self, setting: Setting) -> list[samples.Sample]:
        """Returns all requests, with their events from the trace."""
        events = trace.by_handoff(trace.read(setting.trace))
        return [_sample(measured, events.get(measured.asked.handoff, [])) for measured in self.measured]


def _measure(group: Group, subject: Subject, tokens: list[int]) -> Measured:
    before_s = group.cpu_s()
    if group.decode is None:
        asked, clock = subject.ask(tokens), None
    else:
        with client.CpuClock(group.decode) as clock:
            asked = subject.ask(tokens)
    return Measured(subject.name, len(tokens), asked, group.cpu_s() - before_s, clock)


def _sample(measured: Measured, events: list[trace.Event]) -> samples.Sample:
    asked = measured.asked
    share = measured.clock.share(*samples.prefill_span(asked.asked_s, events)) if measured.clock else None
    return samples.Sample(
        subject=measured.subject,
        num_tokens=measured.num_tokens,
        first_ms=1e3 * (asked.first_s - asked.asked_s),
        second_ms=1e3 * (asked.second_s - asked.asked_s),
        cpu_s=measured.cpu_s,
        decode_share=share,
        exposed=samples.exposed(events),
        handoff=asked.handoff,
    )


def start(pool: ServerPool, setting: Setting, names: Sequence[str]) -> Run:
    """Starts groups one after the other; each is stopped once it is healthy."""
    groups = []
    for name in names:
        report(f"starting {name}")
        group = GROUPS[name](pool, setting)
        with resumed(group.servers):
            for subject in group.subjects:
                subject.ask(random_prompt(_WARM_UP_TOKENS, f"first {subject.name}"))
        groups.append(group)
    return Run(groups)


def report(text: str) -> None:
    """Prints progress to stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
