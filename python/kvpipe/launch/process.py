"""A child process in its own process group, with prefixed log lines.

vLLM's API server starts an EngineCore, which starts workers. All of them stay in the group of the first process, so
/proc shows the group's members even after their parents have died: they outlive a killed API server and hold its log
pipe open. This class is no asyncio subprocess, because `wait()` of those returns when the pipes are closed, not when
the process has ended (Python 3.11).
"""

import asyncio
import collections
import contextlib
import functools
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from kvpipe.launch.watchdog import Watchdog, kill_members

# Lines of output that the message about a dead child shows.
_NUM_TAIL_LINES = 30

# Longer lines are split: vLLM prints its whole configuration as one.
_LINE_LIMIT_BYTES = 1 << 16

_KILL_WAIT_S = 5.0


class ChildProcess:
    """One command, its log and its descendants.

    One event loop owns it. The log file is appended to, so that a restarted child keeps its history.
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
        self._command = tuple(command)
        self._env = dict(env)
        self._echo = echo
        self._watchdog = watchdog
        self._process: subprocess.Popen[bytes] | None = None
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
        self._process = subprocess.Popen(  # noqa: ASYNC220, S603
            self._command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=self._env,
            # A group and not a session: Linux schedules each session as a unit (autogroup). On two cores that left one
            # instance without CPU for up to 50 s while others spun with sched_yield.
            process_group=0,
        )
        self._watchdog.watch(self._process.pid)
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
        await self._kill_group(self._process.pid)
        await self._exited.wait()
        self._watchdog.forget(self._process.pid)
        if self._reader is not None:  # ends with the pipe, unless a process left the group with it
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._reader, _KILL_WAIT_S)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the command, not to its descendants."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _kill_group(self, group_id: int) -> None:
        deadline = asyncio.get_running_loop().time() + _KILL_WAIT_S
        while members := kill_members(group_id):
            if asyncio.get_running_loop().time() > deadline:
                raise RuntimeError(f"{self.name}: processes {members} do not end after SIGKILL")
            await asyncio.sleep(0.02)

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
