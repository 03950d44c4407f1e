"""`ucx_perftest` of UCX: a server and a client for each sample. Its single buffer stays in the cache."""

from __future__ import annotations

import os
import pty
import shutil
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.processes import ANSWER_WITHIN_S, SubjectError, on_cpu
from bench.runner import Sample
from kvpipe.config import ucx_wheel_dir
from kvpipe.launch.process import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from bench.measure import Case
    from bench.runner import Pairs

_MIB = 1 << 20
_WARM_UP = "10"
# Columns of the one line that -f leaves: iterations, latency (50 %, average, overall), MB/s (average, overall), rate
_MEDIAN_US, _OVERALL_MIB_S, _NUM_COLUMNS = 1, 5, 8
_READY = b"Waiting for connection"


@dataclass(frozen=True)
class Perftest:
    """The tool's settings.

    Attributes:
        env: Variables of both processes.
    """

    env: Pairs = ()

    def open(self, words: Mapping[str, object]) -> PerftestRunner:
        """Finds the tool.

        Raises:
            SubjectError: It is not installed.
        """
        wheel, is_pinned = Path(ucx_wheel_dir() or ""), bool(words.get("is_pinned"))
        if (wheel / "bin/ucx_perftest").exists():
            env = {**dict(self.env), "LD_LIBRARY_PATH": f"{wheel}/lib"}
            return PerftestRunner(wheel / "bin/ucx_perftest", env, is_pinned=is_pinned)
        found = shutil.which("ucx_perftest")
        if found is None:
            message = "ucx_perftest is neither in the libucx wheel nor on PATH"
            raise SubjectError(message)
        return PerftestRunner(Path(found), dict(self.env), is_pinned=is_pinned)


class PerftestRunner:
    """Runs the tool for a subject."""

    def __init__(self, path: Path, env: Mapping[str, str], *, is_pinned: bool = False) -> None:
        self._places = (0, 1) if is_pinned else (None, None)
        self._path = str(path)
        self._env = {**os.environ, **env}
        self.transport = ""
        self.version = ""

    def check(self, case: Case, options: Pairs) -> float:
        """Runs one round; the tool verifies nothing. Starting its processes takes longer than measuring."""
        self.sample(case, options, 0, case.first_count)
        return 0.0

    def sample(self, case: Case, options: Pairs, number: int, count: int) -> Sample:
        """Runs server and client once."""
        del number
        chosen = dict(options)
        arguments = ["-e", "-f", "-t", chosen["test"], "-s", str(case.num_bytes)]
        arguments += ["-n", str(count), "-w", _WARM_UP, "-E", chosen.get("wait", "poll")]
        if "memory" in chosen:
            arguments += ["-m", chosen["memory"]]
        if "in_flight" in chosen:
            arguments += ["-O", chosen["in_flight"]]
        columns = self._run(arguments)
        if case.kind == "latency":
            return Sample(columns[_MEDIAN_US], None)
        # Its processes run for one sample, so most of their CPU time would be UCX's start
        return Sample(columns[_OVERALL_MIB_S] * _MIB / 1e9, None)

    def _run(self, arguments: Sequence[str]) -> list[float]:
        port = str(_free_port())
        with on_cpu(self._places[1]):
            server, terminal = self._serve(port)
        try:
            with on_cpu(self._places[0]):
                client = subprocess.run(  # noqa: S603 - UCX's own tool
                    [self._path, "127.0.0.1", "-p", port, *arguments],
                    env=self._env,
                    capture_output=True,
                    text=True,
                    timeout=ANSWER_WITHIN_S,
                    check=False,
                    process_group=0,
                )
        except subprocess.TimeoutExpired as error:
            message = f"did not end within {ANSWER_WITHIN_S:.0f} s"
            raise SubjectError(message) from error
        finally:
            server.kill_all()
            os.close(terminal)
        return figures(client.stdout, client.stderr)

    def _serve(self, port: str) -> tuple[ProcessGroup, int]:
        """Starts the server and waits until it listens. It reports that without delay to a terminal only."""
        terminal, inside = pty.openpty()
        command = [self._path, "-p", port]
        try:
            server = ProcessGroup(command, env=self._env, stdout=inside)
        finally:
            os.close(inside)
        output = b""
        try:
            while _READY not in output:
                output += os.read(terminal, 4096)
        except OSError as error:  # the process of the terminal has ended
            os.close(terminal)
            message = f"its server ended with status {server.wait()}: {output.decode(errors='replace').strip()[-200:]}"
            raise SubjectError(message) from error
        return server, terminal

    def close(self) -> None:
        """Does nothing: no process runs between samples."""


def figures(output: str, errors: str) -> list[float]:
    """Returns the columns of the last line of its output.

    Raises:
        SubjectError: There is no such line.
    """
    for line in output.splitlines():
        words = line.split()
        if len(words) == _NUM_COLUMNS and words[0].isdecimal():
            return [float(word) for word in words]
    message = f"gave no figures: {errors.strip()[-200:] or output.strip()[-200:]}"
    raise SubjectError(message)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
