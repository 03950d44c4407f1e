"""Runs a command and fails when a process of it dies by a fault: `python -m tests.deaths COMMAND ARGUMENT...`.

A test sees the exit status of its own children. What their children die of, a crash of a worker that its engine
survives, nobody asks. The kernel reports the end of every process to whom it lets listen (the process connector of
netlink, for root); where it does not, faults in its log since the command began are taken for the command's own. Also
in the log are the processes that it killed for memory.

A test in which a process dies by a fault on purpose says so: with `EXPECTED_VARIABLE`'s file, where it writes a line
of the signal's name and the process id.
"""

import errno
import os
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

EXPECTED_VARIABLE = "KVPIPE_TEST_DEATHS"
# What the kernel sends for a fault, and a process itself when it aborts. Nobody sends them to end a process.
FAULTS = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS}
)
# What the kernel's log says of a fault and of a process killed for memory: <linux/printk.h> has the head of a record.
IN_LOG = re.compile(r";(.*(?:segfault at|trap |traps: |general protection|Out of memory: Killed process).*)")
OF_MEMORY = "Out of memory"

# <linux/connector.h>, <linux/cn_proc.h>
CN_IDX_PROC = CN_VAL_PROC = 1
NETLINK_CONNECTOR = 11
LISTEN = 1
FORK, EXIT = 0x1, 0x80000000
NETLINK_HEAD, CONNECTOR_HEAD = struct.Struct("=IHHII"), struct.Struct("=IIIIHH")
EVENT_AT = NETLINK_HEAD.size + CONNECTOR_HEAD.size
EVENT = struct.Struct("=IIQIIII")  # kind, CPU, time; then four words of that kind
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 16 << 20
INTERVAL_S = 1.0


@dataclass(frozen=True)
class Death:
    """A process that died by a fault, or one line of the kernel's log that says so."""

    text: str
    number: int = 0
    pid: int = 0

    def __str__(self) -> str:
        return self.text


class ProcessEvents:
    """The ends of a process's descendants, as the kernel reports them to root."""

    def __init__(self) -> None:
        """Listens.

        Raises:
            OSError: The kernel does not let this process.
        """
        self.socket = socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, NETLINK_CONNECTOR)
        try:
            self.socket.bind((0, CN_IDX_PROC))
            self.socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
            self.socket.setblocking(False)  # noqa: FBT003 - its only argument
            wish = CONNECTOR_HEAD.pack(CN_IDX_PROC, CN_VAL_PROC, 0, 0, 4, 0) + struct.pack("=I", LISTEN)
            self.socket.send(NETLINK_HEAD.pack(NETLINK_HEAD.size + len(wish), 3, 0, 0, 0) + wish)
        except OSError:
            self.socket.close()
            raise
        self.family = {os.getpid()}
        self.num_lost = 0

    def ended(self) -> Iterator[Death]:
        """The faults that have been reported since the last call."""
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
            if len(event) < EVENT_AT + EVENT.size:
                continue
            kind, _, _, first, second, third, fourth = EVENT.unpack_from(event, EVENT_AT)
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

    def faults(self) -> list[str]:
        """Its lines about faults and killed processes since the last call."""
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
    expected = Counter(tuple(line.split()) for line in said.splitlines())
    num_expected = expected.total()
    left = []
    for death in deaths:
        line = (signal.Signals(death.number).name, str(death.pid)) if death.number else ()
        if expected[line] > 0:
            expected[line] -= 1
        elif not death.number and OF_MEMORY not in death.text and num_expected > 0:
            num_expected -= 1
        else:
            left.append(death)
    return left


def watched(command: Sequence[str]) -> int:
    """The command's exit status, or 1 where a process of it has died by a fault."""
    log, deaths = KernelLog(), list[Death]()
    try:
        events = ProcessEvents()
    except OSError as error:
        print(f"deaths: the kernel's log alone is looked at, because of its process events: {error}", flush=True)
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
        deaths += [Death(line) for line in log.faults() if events is None or OF_MEMORY in line]
        left = unexpected(deaths, Path(expected.name).read_text())
    if events and events.num_lost:
        print(f"deaths: {events.num_lost} times the kernel had more process events than fit, so some were not seen")
    for death in left:
        print(f"deaths: FAILED: {death}, and no test says that it expects that", flush=True)
    return process.returncode if process.returncode or not left else 1


def expect(number: signal.Signals, pid: int) -> None:
    """Says that a process dies by a fault on purpose, in a test that runs under this program or alone."""
    if path := os.environ.get(EXPECTED_VARIABLE):
        with Path(path).open("a") as expected:
            expected.write(f"{number.name} {pid}\n")


if __name__ == "__main__":
    sys.exit(watched(sys.argv[1:]))
