"""What the native part logs, in Python's logging."""

import logging
import resource
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvpipe import _kvpipe

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
    """Other tests raise the level, and leave records behind that nobody has forwarded."""
    caplog.set_level(logging.WARNING, "kvpipe")
    _kvpipe.forward_log()
    caplog.clear()


def run(program: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(program), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def test_a_warning_of_a_native_thread_is_a_record_of_its_module(caplog, full_file):
    _kvpipe.Trace(str(full_file), "test").instant("any", HANDOFF)
    until = time.monotonic() + TIMEOUT_S
    while not caplog.records and time.monotonic() < until:
        time.sleep(0.01)
        _kvpipe.forward_log()
    record = caplog.records[0]
    assert (record.name, record.levelno) == ("kvpipe.core.trace", logging.WARNING)
    assert record.getMessage().startswith("trace.ended error=File too large")


def test_an_event_is_queued_while_a_thread_of_python_keeps_the_gil(caplog, full_file):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        _kvpipe.Trace(str(full_file), "test").instant("any", HANDOFF)
        until = time.monotonic() + 2
        while time.monotonic() < until:
            pass
        num_forwarded = _kvpipe.forward_log()
    finally:
        sys.setswitchinterval(interval)
    assert num_forwarded == 1
    assert caplog.records[0].name == "kvpipe.core.trace"


@pytest.mark.ucx
def test_what_was_logged_before_the_interpreter_exits_is_not_lost():
    done = run("""
        import logging
        logging.basicConfig(level=logging.DEBUG, format="%(levelname)s %(name)s %(message)s")
        import kvpipe
        kvpipe.info()
    """)
    assert "DEBUG kvpipe.ucx.library ucx.loaded path=" in done.stderr, done.stderr


@pytest.mark.ucx
def test_an_event_of_a_disabled_level_is_not_even_queued():
    done = run("""
        import kvpipe
        from kvpipe import _kvpipe
        kvpipe.info()
        assert _kvpipe.forward_log() == 0
    """)
    assert done.returncode == 0, done.stderr


def test_a_forked_child_logs_for_itself_and_nothing_of_its_parent(full_file):
    program = """
        import logging, os, sys, time
        from kvpipe import _kvpipe

        logging.basicConfig(format="%(process)d %(message)s")
        def warn(name):
            _kvpipe.Trace(sys.argv[1], name).instant("any", bytes(16))
        warn("parent")
        time.sleep(1)
        child = os.fork()
        if child == 0:
            assert _kvpipe.forward_log() == 0
            warn("child")
            until = time.monotonic() + 10
            while _kvpipe.forward_log() == 0:
                assert time.monotonic() < until
                time.sleep(0.01)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert _kvpipe.forward_log() == 1
    """
    done = run(program, full_file)
    assert done.returncode == 0, done.stderr
    assert len({line.split()[0] for line in done.stderr.splitlines()}) == 2, done.stderr
