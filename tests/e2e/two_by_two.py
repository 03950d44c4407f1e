"""The command `kvpipe up --prefill 2 --decode 2 --undivided` with the tiny model, and its lines about instances."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvpipe.launch.watchdog import group_members, kill_members
from tests.e2e.client import TOKEN, until
from tests.e2e.groups import COMMON, LOGS, ROOMY, tiny_model

COMMAND = (
    *(sys.executable, "-m", "kvpipe", "up", "--prefill", "2", "--decode", "2", "--undivided"),
    *("--port", "0", "--block-size", "32", "--omp-threads", "1"),
)
# 128 MiB of KV each: without it a worker touches 1 GiB, and five instances take 5 GB more.
SMALL = ("--num-gpu-blocks-override", "1024")
STATE = re.compile(
    r"^kvpipe up: (\S+)  +(starting|healthy|ended)[\w ]*?  +http://127\.0\.0\.1:(\d+)(?:  +control (\S+))?",
    re.MULTILINE,
)
END_S = 60


@dataclass(frozen=True)
class Process:
    """One instance or the proxy, as the command's lines tell of it."""

    name: str
    port: int
    control: str | None

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"


class TwoByTwo:
    """The running command."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self.url = process.stdout.readline().strip()
        assert self.url, log.read_text()[-4000:]
        # Nothing may block the command.
        threading.Thread(target=process.stdout.read, daemon=True).start()
        states = STATE.findall(log.read_text())
        self._processes = {name: Process(name, int(port), control or None) for name, _, port, control in states}

    def __getitem__(self, name: str) -> Process:
        """A process by its name."""
        return self._processes[name]

    def states(self, name: str) -> list[str]:
        """All states that the command has reported of a process."""
        return [state for found, state, *_ in STATE.findall(self.log) if found == name]

    @property
    def log(self) -> str:
        """The command's stderr so far, with the lines of all processes."""
        return self._log.read_text(errors="replace")

    @property
    def group_ids(self) -> dict[str, int]:
        """The process groups of the instances and the proxy that run now."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        commands = {int(child): Path(f"/proc/{child}/cmdline").read_text().split("\0") for child in children}
        return {
            each.name: pid
            for each in self._processes.values()
            for pid, command in commands.items()
            if str(each.port) in command
        }

    def kill(self, name: str) -> None:
        """Ends a process and its children with SIGKILL, and waits for the line that says so."""
        group_id = self.group_ids[name]
        while kill_members(group_id):
            pass
        until(lambda: self.states(name)[-1] == "ended")

    def end(self) -> int:
        """Ends the command by SIGTERM; returns its exit status when nothing is left of it."""
        group_ids = self.group_ids.values()
        self._process.send_signal(signal.SIGTERM)
        status = self._process.wait(END_S)
        assert [group_members(group_id) for group_id in group_ids] == [[] for _ in group_ids]
        return status


@contextlib.contextmanager
def two_by_two() -> Iterator[TwoByTwo]:
    """Runs the command; it is healthy inside the block. Its watchdog ends the instances if it cannot."""
    folder = LOGS / "two-by-two"
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "up.log"
    command = [*COMMAND, tiny_model(), "--", *COMMON, *ROOMY, *SMALL]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | {"KVPIPE_TOKEN": TOKEN}
        )
    with process:
        try:
            yield TwoByTwo(process, log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
