"""The zygote: imports modules, then forks a program for each request: `python -m tests.zygote.server SOCKET MODULE...`.

A forked process has one thread, and whatever locks the others held. So this one has no other: it imports and computes
nothing, and it refuses to fork once it has a second task, a thread of a reactor among them, or a context of CUDA.
A program has this process's hash seed and all that was read from the environment at import; a request whose
environment says otherwise is refused, too.

vLLM starts EngineCore and workers by the method that `get_mp_context` returns, which is spawn on its CPU platform
whatever the environment says. Here it is fork.
"""

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import selectors
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_DESCRIPTORS = 3
# Variables that libraries and the interpreter read once.
READ_AT_IMPORT = (
    "GOMP_SPINCOUNT",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "PYTHONHASHSEED",
    "VLLM_LOGGING_LEVEL",
    "VLLM_TARGET_DEVICE",
)
AT_START = dict(os.environ)


class RefusedError(Exception):
    """Refusal to fork a program."""


@dataclass(frozen=True)
class Request:
    """A program, and what it has of the client that stands for it."""

    module: str
    arguments: list[str]
    env: dict[str, str]
    folder: str
    group: int
    descriptors: list[int]

    def run(self) -> None:
        """Becomes the program, in a process that was forked for it."""
        for target, descriptor in enumerate(self.descriptors):
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.chdir(self.folder)
        # Imports set variables, too, where the user has not.
        imported = {name: value for name, value in os.environ.items() if AT_START.get(name) != value}
        os.environ.clear()
        os.environ.update(imported | self.env)
        sys.path[:0] = [*filter(None, self.env.get("PYTHONPATH", "").split(os.pathsep)), self.folder]
        sys.argv[1:] = self.arguments
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)

    def check(self) -> None:
        """Refuses a program that would not be what `python -m` starts, and forks with threads."""
        for name in READ_AT_IMPORT:
            theirs, ours = self.env.get(name), AT_START.get(name)
            if theirs != ours:
                raise RefusedError(f"{name} is read at import and is {ours} here, not {theirs}: spawn this program")
        tasks = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        if len(tasks) > 1:
            raise RefusedError(f"a process with threads must not fork, and this one has {', '.join(tasks)}")
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            raise RefusedError("a context of CUDA does not survive a fork, and this process has one")


class Server:
    """Listens for requests, and reports the ends of what it has forked. One thread."""

    def __init__(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._programs: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        # Python writes the number of each signal there.
        self._signals, signals = socket.socketpair()
        self._signals.setblocking(False)  # noqa: FBT003 - its only argument
        signals.setblocking(False)  # noqa: FBT003
        self._signal_sender = signals
        signal.set_wakeup_fd(signals.fileno())
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for source in (sys.stdin.fileno(), self._listener, self._signals):
            self._selector.register(source, selectors.EVENT_READ)

    def until_forked(self) -> Request | None:
        """Forks what is asked for. Returns in each forked process, with its request; None at the end of stdin."""
        while True:
            sources = [key.fileobj for key, _ in self._selector.select()]
            if sys.stdin.fileno() in sources:
                return None
            if self._signals in sources:
                with contextlib.suppress(BlockingIOError):
                    self._signals.recv(4096)
                self._report_ended()
            if self._listener in sources and (request := self._accept()):
                return request

    def _accept(self) -> Request | None:
        connection = self._listener.accept()[0]
        try:
            with received(connection) as request:
                return self._forked(connection, request)
        except RefusedError as error:
            send(connection, {"error": str(error)})
            connection.close()
        return None

    def _forked(self, connection: socket.socket, request: Request) -> Request | None:
        request.check()
        sys.stdout.flush()
        sys.stderr.flush()
        if program := os.fork():
            with contextlib.suppress(OSError):  # it has done so itself, or has ended
                os.setpgid(program, request.group)
            self._programs[program] = connection
            send(connection, {"pid": program})
            return None
        try:
            os.setpgid(0, request.group)
        except OSError:  # the client was killed, and its group with it
            os._exit(1)
        connection.close()
        self._leave()
        return request

    def _report_ended(self) -> None:
        while self._programs:
            program, status = os.waitpid(-1, os.WNOHANG)
            if not program:
                return
            connection = self._programs.pop(program)
            send(connection, {"status": status})
            connection.close()

    def _leave(self) -> None:
        """Gives a forked program no descriptor and no handler of this process."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for each in (self._listener, self._signals, self._signal_sender, *self._programs.values()):
            each.close()


@contextlib.contextmanager
def received(connection: socket.socket) -> Iterator[Request]:
    """A client's request; its descriptors stay open where the block is left in the program."""
    descriptors, zygote = [], os.getpid()
    try:
        try:
            head, descriptors, _, _ = socket.recv_fds(connection, 4, NUM_DESCRIPTORS)
            with connection.makefile("rb") as source:
                payload = json.loads(source.read(int.from_bytes(head, "little")))
        except (OSError, ValueError) as error:
            raise RefusedError(f"the client ended before its request: {error}") from error
        yield Request(**payload, descriptors=descriptors)
    finally:
        if os.getpid() == zygote:
            for descriptor in descriptors:
                os.close(descriptor)


def send(connection: socket.socket, answer: dict[str, Any]) -> None:
    """Sends a client one line, if it has not been killed."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(answer).encode() + b"\n")


def leave_ports() -> None:
    """Replaces inherited sockets of the network, which a spawned process would not have.

    An EngineCore would keep the port of its API server after that one's end.
    """
    for descriptor in [int(link.name) for link in Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError):  # the folder's own descriptor, which is closed
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                leave_port(descriptor)


def leave_port(descriptor: int) -> None:
    """Replaces a socket if it is one of the network; its owner in Python may close it as ever."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if copy.family != socket.AF_UNIX:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, descriptor, inheritable=False)
            os.close(nothing)


def fork_everywhere() -> None:
    """Has vLLM fork its processes."""
    os.register_at_fork(after_in_child=leave_ports)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "vllm" and "get_mp_context" in vars(module):
            module.get_mp_context = lambda: multiprocessing.get_context("fork")


def main() -> None:
    """Serves until stdin ends; in a forked process, runs the program."""
    server = Server(sys.argv[1])
    print("listening", flush=True)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # its owner reads no more than that
    for name in sys.argv[2:]:
        importlib.import_module(name)
    fork_everywhere()
    gc.collect()
    gc.freeze()  # a collection in a program would copy all pages
    if request := server.until_forked():
        request.run()
    else:
        os._exit(0)  # nothing of what was imported has been used


if __name__ == "__main__":
    main()
