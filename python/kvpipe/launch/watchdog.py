"""Process groups: their members, and a watchdog that kills the groups of a launcher that died.

The watchdog is this file run as a program of its own, with group ids on its stdin. It outlives a launcher that was
killed, and kills what vLLM leaves behind when its API server was killed too. The kernel's PR_SET_PDEATHSIG is not
enough: it reaches the first process only. A launcher with several threads can also send it twice, and the second
signal interrupts the shutdown that the first one began.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_GRACE_S = 15.0
_INTERVAL_S = 0.1


def group_members(group_id: int) -> list[int]:
    """Returns the process ids of a group's members, without zombies."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # it has just ended
        # "pid (command) state ppid pgrp …"; the command may hold spaces and parentheses
        state, _, group = stat.rpartition(")")[2].split()[:3]
        if int(group) == group_id and state not in "ZX":
            members.append(int(entry.name))
    return members


def kill_members(group_id: int) -> list[int]:
    """Sends SIGKILL to all members of a group, and returns their ids.

    Repeat it until none is left, because a member may start another one while it is killed.
    """
    members = group_members(group_id)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return members


class Watchdog:
    """The launcher's end of the watchdog: names the groups to kill if this process dies."""

    def __init__(self) -> None:
        """Starts nothing: the watchdog process starts with the first group."""
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group_id: int) -> None:
        """Adds a group, which then ends with this process."""
        if self._process is None:
            self._process = subprocess.Popen(  # noqa: S603 - this file
                # By path and isolated, so that it imports the standard library only
                [sys.executable, "-I", __file__],
                stdin=subprocess.PIPE,
                start_new_session=True,  # the terminal's Ctrl-C does not reach it
            )
        self._send(f"+{group_id}\n")

    def forget(self, group_id: int) -> None:
        """Removes a group that has ended, because its id may be reused."""
        self._send(f"-{group_id}\n")

    async def close(self) -> None:
        """Ends the watchdog, which then ends every remaining group."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            await asyncio.to_thread(process.wait)

    def _send(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it was killed; continue without it
                os.write(self._process.stdin.fileno(), line.encode())


def _read_groups(lines: Iterable[str]) -> set[int]:
    """Reads groups until the end of file, which is the end of the launcher; returns the remaining ones."""
    groups = set()
    for line in lines:
        group_id = int(line[1:])
        if line.startswith("+"):
            groups.add(group_id)
        else:
            groups.discard(group_id)
    return groups


def _end_groups(groups: set[int]) -> None:
    """Sends SIGTERM to the leaders; then SIGKILL to groups without one, and to all groups after the grace period."""
    for group_id in groups:
        with contextlib.suppress(ProcessLookupError):
            os.kill(group_id, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while groups:
        for group_id in list(groups):
            members = group_members(group_id)
            if not members:
                groups.discard(group_id)
            elif group_id not in members or time.monotonic() > deadline:
                kill_members(group_id)
        time.sleep(_INTERVAL_S)


def main() -> None:
    """Waits for the end of the launcher, then ends its remaining groups."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end_groups(_read_groups(sys.stdin))


if __name__ == "__main__":
    main()
