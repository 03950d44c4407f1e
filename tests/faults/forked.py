"""Programs of `tests.peers`, forked from a process that has imported everything: they start in a few milliseconds."""

import contextlib
import logging
import multiprocessing
import os
import signal
import sys

from tests import peers

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.preloaded", __name__])


class Forked(peers.Child):
    """As its parent."""

    def __init__(self, program, *arguments):
        self.process = _Process(program, *map(str, arguments))
        self._limit = peers.Limit(self.process.kill)
        self.killed_at = []


class _Process:
    """The part of `subprocess.Popen` that tests use."""

    def __init__(self, program, *arguments):
        stdin, told = _context.Pipe(duplex=False)
        said, stdout = _context.Pipe(duplex=False)
        ends = (stdin, stdout)
        self._process = _context.Process(target=_run, args=(program, arguments, dict(os.environ), *ends), daemon=True)
        self._process.start()
        for end in ends:
            end.close()
        self.stdin, self.stdout = (os.fdopen(os.dup(end.fileno()), mode) for end, mode in ((told, "w"), (said, "r")))
        told.close()
        said.close()
        self.pid = self._process.pid

    def send_signal(self, number):
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if self.poll() is None:
                os.kill(self.pid, number)

    def kill(self):
        self._process.kill()

    def poll(self):
        return self._process.exitcode

    def wait(self):
        self._process.join()
        return self._process.exitcode


def _run(program, arguments, environment, stdin, stdout):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(peers.ROOT)
    logging.getLogger("kvpipe").setLevel(logging.ERROR)  # that TCP is slower is known
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    stdin.close()
    stdout.close()
    sys.stdin, sys.stdout = os.fdopen(0), os.fdopen(1, "w", buffering=1)
    with contextlib.suppress(BrokenPipeError):
        peers.PROGRAMS[program](*arguments)
