"""Process groups: who is in one, and a watchdog that ends those whose launcher is gone.

The watchdog is a process of its own: `python -m kvpipe._groups`, told over its stdin. It outlives
a launcher that was killed, and ends what vLLM leaves behind when its API server was killed too. The
kernel's PR_SET_PDEATHSIG would not do: it reaches only the first process, and a launcher with
threads that dies can send it more than once, the second into the shutdown that the first began.
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
    """Process ids of the living members of a group, zombies left out."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            stat = (entry / "stat").read_text()
        except OSError:
            continue  # it ended while we looked
        # "pid (command) state ppid pgrp …"; the command may hold spaces and parentheses
        state, _, group = stat.rpartition(")")[2].split()[:3]
        if int(group) == group_id and state not in "ZX":
            members.append(int(entry.name))
    return members


def kill_members(group_id: int) -> list[int]:
    """Sends SIGKILL to all members of a group, and returns who they were.

    To be repeated until nobody is left: a member may start another while it is being killed.
    """
    members = group_members(group_id)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return members


class Watchdog:
    """The launcher's side: names the groups to end should this process die."""

    def __init__(self) -> None:
        """Starts nothing: the process starts with the first group."""
        self._process: subprocess.Popen[bytes] | None = None

    def watch(self, group_id: int) -> None:
        """From now on the group ends with this process."""
        if self._process is None:
            # Its own session, so that the terminal's Ctrl-C does not reach it
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kvpipe._groups"],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
        self._tell(f"+{group_id}\n")

    def forget(self, group_id: int) -> None:
        """The group has ended: its id may soon be somebody else's."""
        self._tell(f"-{group_id}\n")

    async def close(self) -> None:
        """Ends the watchdog, and with it every group that was not forgotten."""
        process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()
            await asyncio.to_thread(process.wait)

    def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody killed it: we do without
                os.write(self._process.stdin.fileno(), line.encode())


def _read_groups(lines: Iterable[str]) -> set[int]:
    """The groups that are left at the end of file, which is the end of the launcher."""
    groups = set()
    for line in lines:
        group_id = int(line[1:])
        if line.startswith("+"):
            groups.add(group_id)
        else:
            groups.discard(group_id)
    return groups


def _end(groups: set[int]) -> None:
    """SIGTERM to the leaders; SIGKILL to a group without one, and to all after the grace."""
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
    """Waits for the end of the launcher, then ends what it left."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _end(_read_groups(sys.stdin))


if __name__ == "__main__":
    main()
