"""Processes in groups of their own, and one of them as a child of an event loop, with prefixed log lines.

vLLM's API server starts an EngineCore, which starts workers. All of them stay in the group of the first process, so
/proc shows the group's members even after their parents have died: they outlive a killed API server and hold its log
pipe open. `ChildProcess` is no asyncio subprocess, because `wait()` of those returns when the pipes are closed, not
when the process has ended (Python 3.11).
"""

import asyncio
import collections
import contextlib
import functools
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from kvpipe.launch.watchdog import Watchdog, group_members, kill_members

# Lines of output that the message about a dead child shows.
_NUM_TAIL_LINES = 30

# Longer lines are split: vLLM prints its whole configuration as one.
_LINE_LIMIT_BYTES = 1 << 16

# Of a process that has been killed: on a busy machine the kernel has not taken its memory back after seconds.
_KILL_WAIT_S = 60.0
_LOG_WAIT_S = 5.0


class ProcessGroup(subprocess.Popen[bytes]):
    """A command in a process group of its own, in which its descendants stay. Calls block.

    It is a group and not a session, because Linux schedules each session as a unit (autogroup). On two cores that left
    one instance without CPU for up to 50 s while others spun with sched_yield.

    Args:
        command: Command line.
        watchdog: Ends the group if this process dies.
        options: Of `subprocess.Popen`. By default the input is empty, and errors go where the output goes.
    """

    def __init__(self, command: Sequence[str], *, watchdog: Watchdog | None = None, **options: Any) -> None:
        defaults = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        super().__init__(command, process_group=0, **{**defaults, **options})
        self._watchdog = watchdog
        if watchdog is not None:
            watchdog.watch(self.pid)

    def members(self) -> list[int]:
        """Returns the ids of all its processes."""
        return group_members(self.pid)

    def signal_all(self, number: int) -> None:
        """Sends a signal to all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill_all(self) -> None:
        """Kills all its processes, and returns when none is left. It may be called repeatedly.

        Raises:
            RuntimeError: Some do not end.
        """
        deadline = time.monotonic() + _KILL_WAIT_S
        while members := kill_members(self.pid):
            if time.monotonic() > deadline:
                raise RuntimeError(f"processes {members} do not end after SIGKILL")
            for pid in members:
                _wait_for_end(pid, deadline)
        self.wait()
        if self._watchdog is not None:
            self._watchdog.forget(self.pid)


class ChildProcess:
    """One command, its log and its descendants.

    One event loop owns it. The log file is appended to, so that a restarted child keeps its history.

    Attributes:
        command: Command line of its next start.
        env: Variables of its next start, and no others.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        watchdog: Watchdog,
        log_path: Path | None = None,
        echo: Callable[[str], None] | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.command = tuple(command)
        self.env = dict(env)
        self._echo = echo
        self._watchdog = watchdog
        self._process: ProcessGroup | None = None
        self._exited = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None
        self._tail: collections.deque[str] = collections.deque(maxlen=_NUM_TAIL_LINES)

    def __repr__(self) -> str:
        """Shows name, process id and state."""
        if self._process is None:
            return f"<ChildProcess {self.name} not started>"
        state = "running" if self.is_running else f"exited {self.returncode}"
        return f"<ChildProcess {self.name} pid={self.pid} {state}>"

    @property
    def pid(self) -> int | None:
        """Process id of the command and id of its group; None before the start."""
        return None if self._process is None else self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs or before the start."""
        return None if self._process is None else self._process.returncode

    @property
    def is_running(self) -> bool:
        """True if it has started and has not ended."""
        return self._process is not None and self._process.returncode is None

    @property
    def tail(self) -> tuple[str, ...]:
        """Its last lines of output, oldest first."""
        return tuple(self._tail)

    async def start(self) -> None:
        """Starts the command; a child that has ended may be started again."""
        if self.is_running:
            raise RuntimeError(f"{self.name} is running already")
        self._exited = asyncio.Event()
        # No asyncio subprocess: see the module's docstring. The call blocks until exec only
        self._process = ProcessGroup(self.command, watchdog=self._watchdog, stdout=subprocess.PIPE, env=self.env)
        self._reader = asyncio.create_task(self._read_log(self._process), name=f"log {self.name}")
        notify = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, self._exited.set)
        waiter = threading.Thread(
            target=_wait_and_notify,
            args=(self._process, notify),
            name=f"wait {self.name}",
            daemon=True,
        )
        waiter.start()

    async def wait(self) -> int | None:
        """Waits until the command has ended, and returns its exit status."""
        if self._process is None:
            raise RuntimeError(f"{self.name} was not started")
        await self._exited.wait()
        return self.returncode

    async def stop(self, grace_s: float) -> None:
        """Ends the command and its descendants: SIGTERM, and SIGKILL after `grace_s`.

        Returns when no process of the group is left. It may be called repeatedly, also after the child has ended.
        """
        if self._process is None:
            return
        if self.is_running:
            self.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exited.wait(), grace_s)
        try:
            await asyncio.to_thread(self._process.kill_all)
        except RuntimeError as error:
            raise RuntimeError(f"{self.name}: {error}") from error
        await self._exited.wait()
        if self._reader is not None:  # ends with the pipe, unless a process left the group with it
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reader, _LOG_WAIT_S)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the command, not to its descendants."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read_log(self, process: subprocess.Popen[bytes]) -> None:
        stream = asyncio.StreamReader(limit=_LINE_LIMIT_BYTES)
        protocol = asyncio.StreamReaderProtocol(stream)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
        with contextlib.closing(transport), contextlib.ExitStack() as stack:
            log = self._open_log(stack)
            while line := await _read_line(stream):
                text = line.decode(errors="replace").rstrip("\r\n")
                self._tail.append(text)
                if log is not None:
                    log.write(text + "\n")
                if self._echo is not None:
                    self._echo(f"[{self.name}] {text}")

    def _open_log(self, stack: contextlib.ExitStack) -> TextIO | None:
        if self.log_path is None:
            return None
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(self.log_path.open("a", encoding="utf-8", buffering=1))


def _wait_for_end(pid: int, deadline: float) -> None:
    """Waits until a process has ended, also one that is no child; until the monotonic time `deadline` at most."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
    finally:
        os.close(descriptor)


def _wait_and_notify(process: subprocess.Popen[bytes], notify: Callable[[], object]) -> None:
    process.wait()
    with contextlib.suppress(RuntimeError):  # the loop is closed
        notify()


async def _read_line(stream: asyncio.StreamReader) -> bytes:
    """Reads one line, or the part of a longer line up to the limit; b"" at the end."""
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(error.consumed)
