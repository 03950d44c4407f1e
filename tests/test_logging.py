"""The log of the native part, in Python's logging."""

import logging
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe import _kvpipe, _log
from tests.peers import wait_until

TIMEOUT_S = 20
HANDOFF = bytes(16)
FILE_CAP = 1 << 30


@pytest.fixture
def full_file(tmp_path: Path) -> Iterator[Path]:
    """A file that is as long as this process may make one: a trace into it fails on its own thread, with a warning."""
    path, limits = tmp_path / "trace", resource.getrlimit(resource.RLIMIT_FSIZE)
    with path.open("wb") as file:
        file.truncate(FILE_CAP)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_CAP, limits[1]))
    yield path
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    """Other tests raise the level, and leave records behind that were not forwarded."""
    caplog.set_level(logging.WARNING, "kvpipe")
    _log.begin()
    _log.forward()
    caplog.clear()


def run(program: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Runs a program. By `warn(path)` a native thread logs a warning, `wait_for(n)` waits for n records."""
    prelude = """
        import atexit, logging, os, sys, time
        from kvpipe import _kvpipe

        def warn(path):
            _kvpipe.Trace(path, "test").instant("any", bytes(16))

        logged = []

        class Logged(logging.Handler):
            def emit(self, record):
                logged.append(record)

        logging.getLogger("kvpipe").addHandler(Logged())
        logging.getLogger("kvpipe").addHandler(logging.StreamHandler())

        def wait_for(num_records):
            until = time.monotonic() + 10
            while len(logged) < num_records:
                assert time.monotonic() < until
                time.sleep(0.01)
    """
    command = [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(program), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_a_warning_of_a_native_thread_is_logged_without_a_call_of_kvpipe(caplog, full_file):
    _kvpipe.Trace(str(full_file), "test").instant("any", HANDOFF)
    wait_until(lambda: caplog.records)
    record = caplog.records[0]
    assert (record.name, record.levelno, record.threadName) == ("kvpipe.core.trace", logging.WARNING, "kvpipe-log")
    assert record.getMessage().startswith("trace.ended error=File too large")


def test_a_signal_does_not_end_the_thread_that_logs(caplog, full_file):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        signal.pthread_kill(_log._forwarder.ident, signal.SIGUSR1)
        time.sleep(0.1)  # the signal may come before or within its wait
        _kvpipe.Trace(str(full_file), "test").instant("any", HANDOFF)
        wait_until(lambda: caplog.records)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_event_is_queued_while_a_thread_of_python_keeps_the_gil(full_file):
    done = run(
        """
        assert _kvpipe.begin_log(logging.WARNING) is not None, "so that nothing else drains the queue"
        sys.setswitchinterval(1000)
        warn(sys.argv[1])
        until = time.monotonic() + 2
        while time.monotonic() < until:
            pass
        records, num_lost = _kvpipe.drain_log(logging.WARNING)
        assert [name for _, name, _ in records] == ["kvpipe.core.trace"]
        assert num_lost == 0
        """,
        full_file,
    )
    assert done.returncode == 0, done.stderr


def test_what_was_logged_just_before_the_interpreter_exits_is_not_lost(full_file):
    done = run(
        """
        def at_exit():
            sys.setswitchinterval(1000)
            warn(sys.argv[1])
            until = time.monotonic() + 1
            while time.monotonic() < until:
                pass

        atexit.register(at_exit)  # before the first pipe or agent
        from kvpipe import _log
        _log.begin()
        """,
        full_file,
    )
    assert done.returncode == 0, done.stderr
    assert "trace.ended error=File too large" in done.stderr


def test_the_thread_that_logs_ends_with_the_interpreter():
    done = run("""
        import threading
        from kvpipe import _log
        _log.begin()
        [thread] = [one for one in threading.enumerate() if one.name == "kvpipe-log"]
        atexit.unregister(_log._end)
        atexit.register(lambda: print(thread.is_alive()))
        atexit.register(_log._end)
    """)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.ucx
@pytest.mark.parametrize(("level", "has_records"), [(logging.DEBUG, True), (logging.WARNING, False)])
def test_an_event_of_a_disabled_level_is_not_even_queued(level, has_records):
    done = run(
        """
        import kvpipe
        level = int(sys.argv[1])
        logging.getLogger("kvpipe").setLevel(level)
        assert _kvpipe.begin_log(level) is not None, "so that nothing else drains the queue"
        kvpipe.info()
        print(bool(_kvpipe.drain_log(level)[0]))
        """,
        level,
    )
    assert (done.returncode, done.stdout) == (0, f"{has_records}\n"), done.stderr


def test_a_forked_child_logs_for_itself_and_nothing_of_its_parent(full_file):
    program = """
        warn(sys.argv[1])
        wait_for(1)
        child = os.fork()
        if child == 0:
            logged.clear()
            warn(sys.argv[1])
            wait_for(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert len(logged) == 1
        warn(sys.argv[1])
        wait_for(2)
    """
    done = run(program, full_file)
    assert done.returncode == 0, done.stderr


def test_a_filter_that_raises_is_reported_and_later_records_pass(full_file):
    program = """
        class Refuses(logging.Filter):
            def __init__(self):
                self.is_first = True

            def filter(self, record):
                if self.is_first:
                    self.is_first = False
                    raise ValueError("refused once")
                return True

        logging.getLogger("kvpipe.core.trace").addFilter(Refuses())
        from kvpipe import _log
        records = [(logging.WARNING, "kvpipe.core.trace", text) for text in ("first", "second")]
        drain = _kvpipe.drain_log
        _kvpipe.drain_log = lambda level: (records, 0)
        _log.forward()
        _kvpipe.drain_log = drain
        assert [record.getMessage() for record in logged] == ["second"]
        warn(sys.argv[1])
        wait_for(2)
    """
    done = run(program, full_file)
    assert done.returncode == 0, done.stderr
    assert "ValueError: refused once" in done.stderr


def test_records_that_were_lost_are_counted(caplog, monkeypatch):
    monkeypatch.setattr(_kvpipe, "drain_log", lambda level: ([], 3))
    _log.forward()
    assert "log.overflow num_lost=3" in caplog.messages
