"""The phases of the benchmark: one group runs at a time, the others are stopped."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

from bench.instances.model import random_prompt
from bench.instances.servers import resumed
from bench.processes import SubjectError
from bench.serving import generator, subjects
from bench.serving.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from bench.instances.servers import ServerPool
    from bench.progress import Progress
    from bench.serving.generator import Outcome
    from bench.serving.plan import Offer
    from bench.serving.subjects import Group, Setting, Subject
    from bench.serving.workload import Mix

# For stopped processes to catch up with expired timers.
_SETTLE_S = 0.5
# vLLM's readers spin for a second after each message; measurements begin after that.
_QUIET_S = 1.2
_NUM_WARM_UP, _WARM_UP_OUTPUT, _MOST_ATTEMPTS = 2, 4, 3
BURST_REQUESTS = 24
LONG_PROMPT_TOKENS = 2048
# The stream of the timeline: prompt, tokens before the long prompt comes, all tokens.
_STREAM_PROMPT, _STREAM_BEFORE, STREAM_TOKENS = 128, 30, 300


@dataclass(frozen=True)
class Cell:
    """One subject at one rate in one round.

    Attributes:
        phase: `idle` (one request at a time), `burst` (all at once) or `load` (Poisson).
        subject: Its name.
        rate: Requests/s; infinite in a burst, 0 when idle.
        number: The round, from 1.
        outcomes: The requests.
        cpu_s: CPU by part.
    """

    phase: str
    subject: str
    rate: float
    number: int
    outcomes: list[Outcome]
    cpu_s: dict[str, float]


@dataclass(frozen=True)
class Timeline:
    """One decode stream while a long prompt arrives at the same instance.

    Attributes:
        subject: Its name.
        chunks_s: When the stream's chunks arrived, from when the long prompt was sent.
        first_s: When the long prompt's first token arrived.
    """

    subject: str
    chunks_s: tuple[float, ...]
    first_s: float

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Times of each chunk's predecessor and of the chunk."""
        return list(pairwise(self.chunks_s))


@dataclass
class Run:
    """Running groups and what was measured.

    Attributes:
        groups: The groups.
        mix: Lengths of prompts and outputs.
        seed: Of arrivals, lengths and prompts.
        limit_s: Seconds after which a request is given up.
        progress: Where progress is shown.
        cells: What was measured.
        timelines: Timelines by subject.
    """

    groups: list[Group]
    mix: Mix
    seed: int
    limit_s: float
    progress: Progress
    cells: list[Cell] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of all subjects."""
        return [subject.name for group in self.groups for subject in group.subjects]

    def idle(self, num_requests: int) -> None:
        """Measures requests that are alone."""
        workload = Workload.draw(self.seed, 1.0, num_requests, self.mix)
        for group, subject in self._turns(0):
            with self._ready(group, subject, "idle"):
                before = group.cpu_s(subject.name)
                outcomes = [
                    asyncio.run(
                        self._ask(
                            subject,
                            workload.prompt(request, f"idle {subject.name}"),
                            request.num_output,
                            request.number,
                        )
                    )
                    for request in workload.requests
                ]
                cpu_s = _since(before, group.cpu_s(subject.name))
                self._add(Cell("idle", subject.name, 0.0, 1, outcomes, cpu_s))

    def burst(self, name: str) -> None:
        """Sends requests to a subject all at once, which saturates it."""
        workload = Workload.draw(self.seed, float("inf"), BURST_REQUESTS, self.mix)
        for group, subject in self._turns(0):
            if subject.name == name:
                self._offer("burst", group, subject, workload, 1)

    def load(self, offer: Offer, number: int) -> None:
        """Offers a rate to each subject. Each round begins with another group."""
        workload = Workload.draw(self.seed, offer.rate, offer.num_requests, self.mix)
        for group, subject in self._turns(number):
            self._offer("load", group, subject, workload, number)

    def timeline(self) -> None:
        """Measures a running stream while a long prompt arrives."""
        for group, subject in self._turns(0):
            with self._ready(group, subject, "timeline"):
                self.timelines.append(asyncio.run(_timeline(subject, self.limit_s)))
            self.progress.line(f"timeline: {subject.name}")

    def outcomes(self, phase: str, subject: str) -> list[Outcome]:
        """All requests of a subject in a phase."""
        cells = [cell for cell in self.cells if (cell.phase, cell.subject) == (phase, subject)]
        return [outcome for cell in cells for outcome in cell.outcomes]

    def saturation(self, name: str) -> float:
        """Requests/s of a subject's burst.

        Raises:
            SubjectError: None of its requests was answered.
        """
        answered = self._answered("burst", name)
        return len(answered) / max(outcome.end_s for outcome in answered)

    def answer_s(self, name: str) -> float:
        """Seconds of a request to an idle subject.

        Raises:
            SubjectError: None of its requests was answered.
        """
        return median(outcome.end_s for outcome in self._answered("idle", name))

    def _answered(self, phase: str, name: str) -> list[Outcome]:
        outcomes = self.outcomes(phase, name)
        answered = [outcome for outcome in outcomes if not outcome.error]
        if not answered:
            message = f"{name} answered no request, {phase}: {outcomes[0].error}"
            raise SubjectError(message)
        return answered

    def _turns(self, number: int) -> Iterator[tuple[Group, Subject]]:
        first = number % len(self.groups)
        for group in [*self.groups[first:], *self.groups[:first]]:
            for subject in group.subjects:
                yield group, subject

    def _offer(self, phase: str, group: Group, subject: Subject, workload: Workload, number: int) -> None:
        use = f"{phase} {subject.name} {number} {workload.rate}"
        label = f"{subject.name}, {rate_text(workload.rate)}, round {number}"
        with self._ready(group, subject, use):
            before = group.cpu_s(subject.name)
            outcomes = asyncio.run(
                generator.offer(subject.target, workload, use, self.limit_s, lambda _: self.progress.step(label))
            )
            cpu_s = _since(before, group.cpu_s(subject.name))
            self._add(Cell(phase, subject.name, workload.rate, number, outcomes, cpu_s))

    def _add(self, cell: Cell) -> None:
        self.cells.append(cell)
        failed = [outcome.error for outcome in cell.outcomes if outcome.error]
        first = f", {len(failed)} failed, the first: {failed[0]}" if failed else ""
        took_s = max(outcome.end_s for outcome in cell.outcomes)
        where = f"load, {rate_text(cell.rate)}, round {cell.number}" if cell.phase == "load" else cell.phase
        num = len(cell.outcomes)
        self.progress.line(f"{where}: {cell.subject}, {num} requests, the last answer after {took_s:.0f} s{first}")

    def _ready(self, group: Group, subject: Subject, use: str) -> _Ready:
        return _Ready(self, group, subject, use)

    async def _ask(self, subject: Subject, prompt: list[int], num_output: int, number: int) -> Outcome:
        return await generator.ask(subject.target, prompt, num_output, self.limit_s, number)


class _Ready:
    """A group that runs inside the block, after requests that bring back sessions which broke while it was stopped."""

    def __init__(self, run: Run, group: Group, subject: Subject, use: str) -> None:
        self._run, self._group, self._subject, self._use = run, group, subject, use
        self._resumed = resumed(group.servers)

    def __enter__(self) -> None:
        self._resumed.__enter__()
        time.sleep(_SETTLE_S)
        warm_up(self._group, self._subject, self._use, _STREAM_PROMPT, self._run.limit_s)
        time.sleep(_QUIET_S)

    def __exit__(self, *error: object) -> None:
        self._resumed.__exit__(None, None, None)


def warm_up(group: Group, subject: Subject, use: str, num_tokens: int, limit_s: float) -> None:
    """Sends a short request to each instance, again where it fails.

    Raises:
        SubjectError: A server has ended, or does not answer.
    """
    for number in range(_NUM_WARM_UP):
        for attempt in range(_MOST_ATTEMPTS):
            prompt = random_prompt(num_tokens, f"warm up {subject.name} {use} {number} {attempt}")
            found = asyncio.run(generator.ask(subject.target, prompt, _WARM_UP_OUTPUT, limit_s, number))
            for server in group.servers:
                server.require_running()
            if not found.error:
                break
        else:
            message = f"{subject.name} does not answer: {found.error}"
            raise SubjectError(message)


async def _timeline(subject: Subject, limit_s: float) -> Timeline:
    has_begun = asyncio.Event()

    def seen(num_chunks: int) -> None:
        if num_chunks == _STREAM_BEFORE:
            has_begun.set()

    began_s = time.monotonic()
    prompt = random_prompt(_STREAM_PROMPT, f"timeline {subject.name}")
    stream = asyncio.create_task(generator.ask(subject.one, prompt, STREAM_TOKENS, limit_s, seen=seen))
    await asyncio.wait({stream, asyncio.create_task(has_begun.wait())}, return_when=asyncio.FIRST_COMPLETED)
    sent_s = time.monotonic()
    long_prompt = random_prompt(LONG_PROMPT_TOKENS, f"timeline, long {subject.name}")
    long = await generator.ask(subject.one, long_prompt, _WARM_UP_OUTPUT, limit_s)
    found = await stream
    for outcome in (found, long):
        if outcome.error:
            message = f"timeline of {subject.name}: {outcome.error}"
            raise SubjectError(message)
    chunks_s = tuple(at_s - (sent_s - began_s) for at_s in found.chunks_s)
    return Timeline(subject.name, chunks_s, long.chunks_s[0])


def _since(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {part: after[part] - seconds for part, seconds in before.items()}


def rate_text(rate: float) -> str:
    """A rate as the tables show it."""
    return "all at once" if rate == float("inf") else f"{rate:.3g}/s"


def start(
    pool: ServerPool, setting: Setting, names: Sequence[str], mix: Mix, report: Callable[[str], None]
) -> list[Group]:
    """Starts groups one after the other; each is stopped once it is healthy and has answered a long request."""
    groups = []
    for group_names in subjects.grouped(names):
        began_s = time.monotonic()
        report(f"starting {', '.join(group_names)}")
        group = subjects.start(pool, setting, group_names)
        with resumed(group.servers):
            # The first long request touches new memory.
            warm_up(group, group.subjects[0], "start", mix.prompt_tokens[1], 600.0)
        groups.append(group)
        report(f"started {', '.join(group_names)} in {time.monotonic() - began_s:.0f} s")
    return groups
