"""Processes that are attacked: engines of the checker, and a server of the store."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import Future

from kvpipe.launch.process import ProcessGroup
from tests.chaos.relay import HERE, RELAYED
from tests.peers import ROOT

# From its fork until it listens; two busy cores.
STARTS_WITHIN_S = 180
ENDS_WITHIN_S = 30


class LostError(Exception):
    """An engine has ended before its answer."""


class StartError(Exception):
    """An engine does not start."""


class Attacked:
    """A server that is killed and started again, at the same ports.

    Attributes:
        name: Its name.
        ports: Its ports.
        incarnations: Number of its starts.
    """

    _stdout = None  # the log

    def __init__(self, name, ports, command, env, log):
        self.name, self.ports = name, ports
        self._command, self._env, self._log = command, env, log
        self.incarnations = 0
        self._is_ended_on_purpose = True

    def start(self):
        """Starts a process."""
        self.incarnations += 1
        self._is_ended_on_purpose = False
        with self._log.open("ab") as log:
            self._process = ProcessGroup(
                self._command, stdin=subprocess.PIPE, stdout=self._stdout or log, stderr=log, env=self._env, cwd=ROOT
            )

    @property
    def has_died(self):
        """True if it has ended, and was not killed."""
        return not self._is_ended_on_purpose and self._process.poll() is not None

    def signal(self, number):
        """Sends a signal."""
        self._process.signal_all(number)

    def kill(self):
        """Kills it, with SIGKILL."""
        self._is_ended_on_purpose = True
        self._process.kill_all()
        self._close_stdin()

    def end(self):
        """Has it end by itself; returns its status."""
        self._is_ended_on_purpose = True
        self._process.signal_all(signal.SIGCONT)
        self._close_stdin()
        try:
            return self._process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            return None
        finally:
            self._process.kill_all()

    def _close_stdin(self):
        with contextlib.suppress(OSError):  # a command that it did not read
            self._process.stdin.close()


class EngineProcess(Attacked):
    """An engine. Several threads ask it.

    Attributes:
        address: Its control port, as others reach it.
        num_answered: Requests with a handoff to consume that this incarnation has answered.
        num_aborted: Those that their clients have aborted.
        results: Of this incarnation's handoffs, as it last reported.
        past_results: The same of all incarnations before.
    """

    _stdout = subprocess.PIPE

    def __init__(self, name, ports, command, env, log):
        super().__init__(name, ports, command, env, log)
        self._lock = threading.Lock()
        self._open = {}
        self._is_up = False
        self.address = ""
        self.num_answered = self.num_aborted = 0
        self.results: Counter[str] = Counter()
        self.past_results: Counter[str] = Counter()

    def start(self):
        super().start()
        self.past_results += self.results
        self.num_answered = self.num_aborted = 0
        self.results = Counter()
        self._hello = self._expect("hello")
        self._is_up = True
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        self._reader.start()

    def await_start(self):
        """Waits until it listens.

        Raises:
            StartError: It has ended, or takes too long.
        """
        try:
            self.address = self._hello.result(STARTS_WITHIN_S)["address"]
        except LostError:
            raise StartError(f"{self.name} has ended before it listened; its log is {self._log}") from None
        except TimeoutError:
            text = f"{self.name} did not listen within {STARTS_WITHIN_S} s; its log is {self._log}"
            raise StartError(text) from None

    @property
    def is_up(self):
        """True if requests reach it."""
        return self._is_up and self._hello.done()

    def ask(self, key, /, **command):
        """Sends a command; returns the future of its answer, which may be a LostError."""
        future = self._expect(key)
        self.tell(**command)
        return future

    def tell(self, **command):
        """Sends a command without an answer."""
        line = json.dumps(command).encode() + b"\n"
        try:
            with self._lock:
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError):
            self._lose()

    def kill(self):
        self._is_up = False
        super().kill()
        self._reader.join()
        self._process.stdout.close()

    def end(self):
        self._is_up = False
        status = super().end()
        self._reader.join()
        self._process.stdout.close()
        return status

    def _expect(self, name):
        future = Future()
        with self._lock:
            self._open[name] = future
        return future

    def _read(self, answers):
        for line in answers:
            answer = json.loads(line)
            if "results" in answer:
                self.results = Counter(answer["results"])
            name = "hello" if "address" in answer else "look" if "looked" in answer else answer["ended"]
            with self._lock:
                future = self._open.pop(name, None)
            if future is not None:
                future.set_result(answer)
        self._lose()

    def _lose(self):
        self._is_up = False
        with self._lock:
            futures, self._open = list(self._open.values()), {}
        for future in futures:
            future.set_exception(LostError(self.name))


def engine(name, ports, command, env, log, /, **settings):
    """An engine that is reached through the relay."""
    if "store" not in settings:
        settings |= {
            "listen": f"{HERE}:{ports[0]}",
            "advertise": RELAYED,
            "agent_ports": f"{ports[1]}-{ports[1]}",
        }
    return EngineProcess(name, ports, [*command, json.dumps(settings)], env, log)


def store_server(ports, env, log):
    """A server of kvpipe's store."""
    command = [sys.executable, "-m", "kvpipe", "store", "serve", "--listen", f"{HERE}:{ports[0]}"]
    return Attacked("store", ports, command, env, log)
