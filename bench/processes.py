"""Processes of a benchmark, which answer each line of input with one line of output."""

from __future__ import annotations

import http.client
import os
import select
import subprocess
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from bench.checkout import python_path
from bench.programs import request
from kvpipe.exceptions import KVPipeError
from kvpipe.launch.process import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# For the slowest answers: an import of torch, a round of 64 MiB tensors on a busy machine.
ANSWER_WITHIN_S = 60.0
_CHUNK_BYTES = 1 << 16
_ERROR_CHARACTERS = 300
_LOOK_EVERY_S = 0.5


class SubjectError(KVPipeError):
    """A subject could not be started, or failed."""


class Side(Protocol):
    """One process of a program, here or on another host."""

    def ask(self, line: str) -> None:
        """Sends a request; `answer` returns its answer."""

    def answer(self) -> dict[str, str]:
        """Waits for the answer to the oldest request.

        Raises:
            SubjectError: The answer is an error, or is late.
        """

    def cpu_s(self) -> float:
        """Seconds of CPU that its threads have used so far."""

    def close(self) -> None:
        """Ends the process."""


@contextmanager
def requests_to(url: str) -> Iterator[None]:
    """Requests to a server of a subject.

    Raises:
        SubjectError: The server does not answer, or breaks off.
    """
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        message = f"{url} does not answer: {type(error).__name__}: {error}"
        raise SubjectError(message) from error


def parse_answer(line: str) -> dict[str, str]:
    """Parses the words of an answer.

    Raises:
        SubjectError: The answer is an error.
    """
    verb, _, text = line.partition(" ")
    if verb not in ("hello", "ok"):
        raise SubjectError(text[:_ERROR_CHARACTERS] or line)
    return request.parse(line)[1]


@contextmanager
def on_cpu(place: int | None) -> Iterator[None]:
    """Processes that are started meanwhile stay on one CPU, another for each place; `None` leaves them to Linux."""
    cpus = os.sched_getaffinity(0)
    if place is None:
        yield
        return
    os.sched_setaffinity(0, {sorted(cpus)[place % len(cpus)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


def until(is_so: Callable[[], bool], within_s: float, look_every_s: float = _LOOK_EVERY_S) -> bool:
    """Waits until something is so, or that time is over; returns whether it is."""
    ends_at = time.monotonic() + within_s
    while not (holds := is_so()) and time.monotonic() < ends_at:
        time.sleep(look_every_s)
    return holds


def clock_s(pid: int) -> float:
    """Seconds of CPU that all threads of another process have used."""
    # Linux's clock of another process: its id inverted, and CPUCLOCK_SCHED (2)
    return time.clock_gettime((~pid << 3) | 2)


class Process:
    """A process on this machine.

    Args:
        command: Command line; its first output is a hello.
        env: Variables in addition to those of this process.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process ended, closed by close()
        self._unread = b""
        try:
            # In a group of its own: Ctrl-C reaches this process only, which then ends the others.
            self._process = ProcessGroup(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": python_path(), **env},
            )
        except OSError as error:
            self._errors.close()
            message = f"cannot start {command[0]}: {error.strerror}"
            raise SubjectError(message) from error

    def ask(self, line: str) -> None:
        """Sends a request."""
        assert self._process.stdin is not None  # noqa: S101 - for mypy: it is a pipe
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> dict[str, str]:
        """Waits for the answer to the oldest request."""
        return parse_answer(self.line())

    def line(self) -> str:
        """Returns its next line of output.

        Raises:
            SubjectError: The process is late, or has ended.
        """
        give_up_at = time.monotonic() + ANSWER_WITHIN_S
        while b"\n" not in self._unread:
            self._read(give_up_at)
        line, _, self._unread = self._unread.partition(b"\n")
        return line.decode(errors="replace")

    def _read(self, give_up_at: float) -> None:
        assert self._process.stdout is not None  # noqa: S101 - for mypy: it is a pipe
        descriptor = self._process.stdout.fileno()
        readable, _, _ = select.select([descriptor], [], [], max(0.0, give_up_at - time.monotonic()))
        if not readable:
            message = f"did not answer within {ANSWER_WITHIN_S:.0f} s"
            raise SubjectError(message)
        chunk = os.read(descriptor, _CHUNK_BYTES)
        if not chunk:
            raise self._ended()
        self._unread += chunk

    def _ended(self) -> SubjectError:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        reason = f": {last[:_ERROR_CHARACTERS]}" if last else ""
        return SubjectError(f"its process ended with status {status}{reason}")

    def cpu_s(self) -> float:
        """Seconds of CPU that its threads have used so far."""
        return clock_s(self._process.pid)

    def signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        self._process.send_signal(number)

    def end_input(self) -> None:
        """Ends its input, which ends programs that read it to the end."""
        stdin, self._process.stdin = self._process.stdin, None
        if stdin is not None:
            stdin.close()

    def close(self) -> None:
        """Kills the process, which has no state to save."""
        self._process.kill_all()
        self._process.communicate()
        self._errors.close()
