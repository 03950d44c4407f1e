"""Runs a command and fails when a process of it dies by a fault: `python -m tests.deaths COMMAND ARGUMENT...`.

A test sees the exit status of its own children. What their children die of, a crash of a worker that its engine
survives, no test asks. The kernel reports the end of every process to root (the process connector of netlink). Where
it does not, faults in its log since the command began count as the command's own. Also in the log are the processes
that it killed for memory.

A test in which a process dies by a fault on purpose says so: with `EXPECTED_VARIABLE`'s file, where it writes a line
of the signal's name and the process id. A run inside another one reports its deaths there, too, so that they count
once. The outermost run reads the log, which is that of the whole machine.
"""

import errno
import os
import re
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EXPECTED_VARIABLE = "KVPIPE_TEST_DEATHS"
# Signals of the kernel for a fault, and of a process itself when it aborts. They are not used to end a process.
FAULTS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
# Text of a fault, and of a process killed for memory, in the kernel's log: <linux/printk.h> has the head of a record.
IN_LOG = re.compile(r";(.*(?:segfault at|trap |traps: |general protection|Out of memory: Killed process).*)")
OF_MEMORY = "Out of memory"

# <linux/connector.h>, <linux/cn_proc.h>
CN_IDX_PROC = CN_VAL_PROC = 1
NETLINK_CONNECTOR = 11
LISTEN, IGNORE = 1, 2
FORK, EXIT = 0x1, 0x80000000
NETLINK_HEAD, CONNECTOR_HEAD = struct.Struct("=IHHII"), struct.Struct("=IIIIHH")
EVENT_AT = NETLINK_HEAD.size + CONNECTOR_HEAD.size
EVENT = struct.Struct("=IIQIIII")  # kind, CPU, time; then four words of that kind
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 16 << 20
INTERVAL_S = 1.0
# Without a report of a process of our own by then, there will be none: so it is in another PID namespace.
FIRST_REPORT_S = 2.0


@dataclass(frozen=True)
class Death:
    """A process that died by a fault, or one line of the kernel's log that says so."""

    text: str
    number: int = 0
    pid: int = 0

    def __str__(self) -> str:
        return self.text

    @property
    def line(self) -> str:
        """Line of a test that expects it; empty for a line of the log, which no test can expect."""
        return f"{signal.Signals(self.number).name} {self.pid}" if self.number else ""


class ProcessEvents:
    """The ends of a process's descendants, as the kernel reports them to root."""

    def __init__(self) -> None:
        """Listens.

        Raises:
            OSError: The kernel does not let this process, or reports nothing.
        """
        self.family = {os.getpid()}
        self.num_lost = 0
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_CONNECTOR)
        try:
            self.socket.bind((0, CN_IDX_PROC))
            self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
            self.socket.setblocking(False)  # noqa: FBT003 - its only argument
            self._ask(LISTEN)
            self._check()
        except OSError:
            self.socket.close()
            raise

    def close(self) -> None:
        """Ends the reports."""
        self._ask(IGNORE)
        self.socket.close()

    def _ask(self, operation: int) -> None:
        wish = CONNECTOR_HEAD.pack(CN_IDX_PROC, CN_VAL_PROC, 0, 0, 4, 0) + struct.pack("=I", operation)
        self.socket.send(NETLINK_HEAD.pack(NETLINK_HEAD.size + len(wish), 3, 0, 0, 0) + wish)

    def _check(self) -> None:
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
        process.wait()
        deadline = time.monotonic() + FIRST_REPORT_S
        while (left_s := deadline - time.monotonic()) > 0:
            select.select([self.socket], [], [], left_s)
            if any(kind == EXIT and pid == process.pid for kind, _, pid, _, _ in self._reports()):
                return
        raise OSError(errno.ENODATA, "no process is reported")

    def _reports(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Kinds of events, each with its four words."""
        while True:
            try:
                event = self.socket.recv(1024)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                self.num_lost += 1
                continue
            if len(event) >= EVENT_AT + EVENT.size:
                kind, _, _, *words = EVENT.unpack_from(event, EVENT_AT)
                yield (kind, *words)

    def ended(self) -> Iterator[Death]:
        """The faults that have been reported since the last call."""
        for kind, first, second, third, fourth in self._reports():
            if kind == FORK and second in self.family and third == fourth:  # a process and no thread
                self.family.add(fourth)
            elif kind == EXIT and first == second and second in self.family:
                self.family.discard(second)
                if (number := third & 0x7F) in FAULTS:
                    yield Death(f"process {second} died by {signal.Signals(number).name}", number, second)


class KernelLog:
    """The kernel's log from now on; empty where it cannot be read."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
            os.lseek(self._file, 0, os.SEEK_END)
        except OSError:
            self._file = -1

    def deaths(self, *, has_events: bool) -> list[Death]:
        """Deaths since the last call: of processes killed for memory, and without `has_events` those by faults, too."""
        return [Death(line) for line in self._lines() if not has_events or OF_MEMORY in line]

    def _lines(self) -> list[str]:
        lines = []
        while self._file >= 0:
            try:
                record = os.read(self._file, 8192).decode(errors="replace")
            except BlockingIOError:
                break
            except BrokenPipeError:  # some were overwritten meanwhile
                continue
            if found := IN_LOG.search(record):
                lines.append(found[1])
        return lines


def unexpected(deaths: Sequence[Death], said: str) -> list[Death]:
    """The deaths that no test has written a line about. Those of the kernel's log have no process, and count."""
    expected = Counter(said.splitlines())
    num_expected = expected.total()
    left = []
    for death in deaths:
        if expected[death.line] > 0:
            expected[death.line] -= 1
        elif not death.number and OF_MEMORY not in death.text and num_expected > 0:
            num_expected -= 1
        else:
            left.append(death)
    return left


def watched(command: Sequence[str]) -> int:
    """The command's exit status, or 1 where a process of it has died by a fault."""
    is_outermost = EXPECTED_VARIABLE not in os.environ
    log, deaths = KernelLog(), list[Death]()
    try:
        events = ProcessEvents()
    except OSError as error:
        print(f"deaths: only the kernel's log shows faults, because it reports no processes: {error}", flush=True)
        events = None
    with tempfile.NamedTemporaryFile("r", prefix="kvpipe-deaths-") as expected, selectors.DefaultSelector() as selector:
        process = subprocess.Popen(command, env=os.environ | {EXPECTED_VARIABLE: expected.name})
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: process.send_signal(number))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the command, too
        ended = os.pidfd_open(process.pid)
        selector.register(ended, selectors.EVENT_READ)
        if events:
            selector.register(events.socket, selectors.EVENT_READ)
        while process.poll() is None:
            selector.select(INTERVAL_S)
            if events:
                deaths += events.ended()
        if events:
            deaths += events.ended()
            events.close()
        os.close(ended)
        said = Path(expected.name).read_text()
    if is_outermost:
        deaths += log.deaths(has_events=events is not None)
    else:
        report(said, deaths)
    left = unexpected(deaths, said)
    if events and events.num_lost:
        print(f"deaths: some processes were not seen: the kernel had too many reports {events.num_lost} times")
    for death in left:
        print(f"deaths: FAILED: {death}, and no test says that it expects that", flush=True)
    return process.returncode if process.returncode or not left else 1


def report(said: str, deaths: Sequence[Death]) -> None:
    """Has the run around this one expect what tests of this one expect, and the deaths that it has shown itself."""
    lines = {line for line in said.splitlines() if line} | {each.line for each in deaths}
    with Path(os.environ[EXPECTED_VARIABLE]).open("a") as expected:
        expected.writelines(f"{line}\n" for line in sorted(lines))


def has_events() -> bool:
    """True if the kernel reports processes to this one."""
    try:
        ProcessEvents().close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(watched(sys.argv[1:]))
