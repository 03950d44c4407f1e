"""Rounds: each prompt is new, asked once, forgotten by the instance, and asked again. One request is under way."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.handoff import client
from bench.instances.model import random_prompt
from bench.processes import SubjectError
from bench.reuse.subjects import CHUNK_TOKENS, OURS

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.reuse.subjects import Subject

# vLLM's readers spin for a second after each message, on all available CPUs; measurements begin after that.
_QUIET_S = 1.2
_WARM_UP_TOKENS = 2 * CHUNK_TOKENS


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        first_token_ms: To its first token.
        cpu_s: CPU time of vLLM until the answer has ended; the first time until the store has the KV. Servers beside
            vLLM are not counted.
        num_loaded: Tokens whose KV the instance had from the store.
    """

    first_token_ms: float
    cpu_s: float
    num_loaded: int


@dataclass(frozen=True)
class Reuse:
    """One prompt of one subject: asked first, and again."""

    first: Ask
    again: Ask

    def of(self, kind: str) -> Ask:
        """Returns the `first ask` or the `second ask`."""
        return self.first if kind == "first ask" else self.again


@dataclass(frozen=True)
class Rounds:
    """Measures all subjects in each round, beginning with another one each time.

    Attributes:
        subjects: Those that take part. One that is not ours ends when it fails, and the others go on.
        num_tokens: Of a prompt.
        report: Tells progress.
        skipped: Subjects that were left out, each with the reason.
        found: What was measured of each subject.
    """

    subjects: list[Subject]
    num_tokens: int
    report: Callable[[str], None]
    skipped: dict[str, str]
    found: dict[str, list[Reuse]] = field(default_factory=dict)

    def measure(self, num_rounds: int) -> None:
        """Measures rounds, after one that does not count because it touches new memory.

        Raises:
            SubjectError: An instance of ours has ended, or does not answer; or KV came from elsewhere than it should.
        """
        self.found.update((subject.name, []) for subject in self.subjects)
        for number in range(num_rounds + 1):
            first = number % len(self.subjects)
            for subject in [*self.subjects[first:], *self.subjects[:first]]:
                try:
                    reuse = self._ask_twice(subject, number)
                except SubjectError as error:
                    self._leave_out(subject, error)
                    continue
                if number:
                    self.found[subject.name].append(reuse)
                self.report(
                    f"round {number} of {num_rounds}: {subject.name}: {reuse.first.first_token_ms:.0f} ms, then "
                    f"{reuse.again.first_token_ms:.0f} ms with {reuse.again.num_loaded} tokens from the store"
                )

    def _leave_out(self, subject: Subject, error: SubjectError) -> None:
        if subject.name in OURS:
            raise error
        self.report(f"{subject.name} is left out: {error}")
        subject.stack.close()
        self.subjects.remove(subject)
        del self.found[subject.name]
        self.skipped[subject.name] = str(error)

    def _ask_twice(self, subject: Subject, number: int) -> Reuse:
        self._warm_up(subject, number)
        prompt = random_prompt(self.num_tokens, f"{number} {subject.name}")
        first = _ask(subject, prompt, self.num_tokens // CHUNK_TOKENS)
        subject.forget()
        time.sleep(_QUIET_S)
        again = _ask(subject, prompt, 0)
        if first.num_loaded or (again.num_loaded and not subject.has_store):
            message = f"{subject.name}: KV of a new prompt came from elsewhere"
            raise SubjectError(message)
        if subject.has_store and not again.num_loaded:
            message = f"{subject.name}: no KV came from the store"
            raise SubjectError(message)
        return Reuse(first, again)

    def _warm_up(self, subject: Subject, number: int) -> None:
        subject.contents.clear()
        client.stream(subject.instance.url, random_prompt(_WARM_UP_TOKENS, f"warm {number} {subject.name}"))
        subject.contents.until_stored(_WARM_UP_TOKENS // CHUNK_TOKENS)
        subject.contents.clear()
        subject.forget()
        time.sleep(_QUIET_S)


def _ask(subject: Subject, prompt: list[int], num_stored: int) -> Ask:
    """Asks, and waits until so many chunks are stored."""
    loaded, cpu_s = subject.num_loaded(), subject.instance.cpu_s()
    found = client.stream(subject.instance.url, prompt)
    subject.contents.until_stored(num_stored)
    cpu_s = subject.instance.cpu_s() - cpu_s
    return Ask(1e3 * (found.texts_s[0] - found.asked_s), cpu_s, round(subject.num_loaded() - loaded))
