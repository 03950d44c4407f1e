"""`kvpipe bench pipe`: latency and throughput of a Pipe between two processes, beside memcpy in the same run.

This process sends; a second one, started here, receives and sends back. Each round measures every size by every
method, one after the other, so that what disturbs the machine for a while disturbs all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpipe.bench import measure, report
from kvpipe.exceptions import ConfigError, CorruptDataError, EndOfPipeError, KVPipeError, PeerLostError
from kvpipe.pipe import Pipe

try:
    import numpy as np
except ModuleNotFoundError as error:
    _MISSING = "numpy is not installed; pip install 'kvpipe[bench]'"
    raise ConfigError(_MISSING) from error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_SIZES = "8,64,512,4K,32K,256K,2M,16M,64M"
_LEAST_ROUNDS = 5
_START_WITHIN_S = 60.0
_STEP_WITHIN_S = 60.0
_ASSUMED_CACHE_BYTES = 32 << 20

# What the other process is asked to do with the next tensors.
_ECHO, _RECEIVE_FRESH, _RECEIVE_OUT = range(3)
_COLUMNS = {
    "latency_us": "latency us",
    "pipe_fresh": "Pipe GB/s, fresh",
    "memcpy_fresh": "memcpy GB/s, fresh",
    "pipe_out": "Pipe GB/s, out=",
    "memcpy_out": "memcpy GB/s, into",
}


def main(arguments: Sequence[str]) -> int:
    """Runs the benchmark and prints its table.

    Args:
        arguments: What follows `kvpipe bench pipe`.

    Returns:
        The exit status.

    Raises:
        PeerLostError: The second process ended before its time.
        CorruptDataError: Something else arrived than was sent.
    """
    args = _parse(arguments)
    sizes = measure.parse_sizes(args.sizes)
    facts = report.machine()
    total = measure.working_set_bytes(facts["cache_bytes"] or _ASSUMED_CACHE_BYTES, sizes)
    with _second_process(total) as (there, back):
        facts |= {"transport": there.transport, "working_set_bytes": total, "rounds": args.rounds}
        results = _measure(_Bench(there, back, total), sizes, args.rounds)
    facts["load_average_after"] = report.load_average()
    sys.stdout.write(f"{report.describe(facts)}\n\n{_table(results)}\n")
    if args.json:
        report.write_json(args.json, facts, results)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvpipe bench pipe",
        description="Latency and GB/s of a Pipe between two processes, beside memcpy.",
        epilog="fresh: into memory that is allocated for each tensor. out=, into: into memory that is there. "
        "Each cell is the median and, in brackets, the 10th and the 90th percentile.",
    )
    parser.add_argument("--sizes", default=_SIZES, metavar="LIST", help=f"bytes, default {_SIZES}")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="at least 5, default 7")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args(arguments)
    if args.rounds < _LEAST_ROUNDS:
        parser.error(f"--rounds {args.rounds}: a median with percentiles needs at least {_LEAST_ROUNDS}")
    return args


def _table(results: Sequence[tuple[int, dict[str, measure.Summary]]]) -> str:
    rows = [
        [report.size_text(size), *(report.cell(summaries[name]) for name in _COLUMNS)] for size, summaries in results
    ]
    return report.table(["size", *_COLUMNS.values()], rows)


# --- measuring --------------------------------------------------------------------------------------------------


def _measure(bench: _Bench, sizes: Sequence[int], rounds: int) -> list[tuple[int, dict[str, measure.Summary]]]:
    samples: dict[int, dict[str, list[float]]] = {size: {name: [] for name in _COLUMNS} for size in sizes}
    progress = report.Progress((rounds + 1) * len(sizes))
    try:
        for size in sizes:
            bench.check(size)
            bench.round(size)  # warm-up: first touch, registration, connection
            progress.step(f"warm-up, {report.size_text(size)}")
        for number in range(1, rounds + 1):
            progress.line(f"round {number} of {rounds}")
            for size in sizes:
                for name, values in bench.round(size).items():
                    samples[size][name] += values
                progress.step(f"round {number}, {report.size_text(size)}")
    finally:
        progress.end()
    return [(size, {name: measure.summarize(values) for name, values in samples[size].items()}) for size in sizes]


@dataclass
class _Bench:
    """This process's side of the measurement.

    Attributes:
        there: To the second process.
        back: From the second process.
        total: Bytes of the buffers that are walked through.
        source: What is sent and copied.
        room: Where memcpy copies to.
    """

    there: Pipe
    back: Pipe
    total: int
    source: Any = field(init=False)
    room: Any = field(init=False)

    def __post_init__(self) -> None:
        self.source = np.random.default_rng(0).integers(0, 256, self.total, np.uint8)
        self.room = np.ones(self.total, np.uint8)

    def check(self, size: int) -> None:
        """Whether what goes there and back is what was sent."""
        self._ask(_ECHO, size, 1)
        sent = self.source[:size]
        work = self.there.isend_tensor(sent)
        received = self.back.recv_tensor(timeout=_STEP_WITHIN_S)
        work.wait(_STEP_WITHIN_S)
        if not np.array_equal(sent, received):
            message = f"a tensor of {size} bytes did not come back as it was sent"
            raise CorruptDataError(message)

    def round(self, size: int) -> dict[str, list[float]]:
        """One round of a size, by all methods."""
        count = measure.tensors_per_round(size)
        return {
            "latency_us": self._latency(size, measure.pings_per_round(size)),
            "pipe_fresh": [self._send(_RECEIVE_FRESH, size, count)],
            "memcpy_fresh": [self._copy(size, count, lambda at: self.source[at : at + size].copy())],
            "pipe_out": [self._send(_RECEIVE_OUT, size, count)],
            "memcpy_out": [self._copy(size, count, lambda at: self._copy_over(at, size))],
        }

    def _latency(self, size: int, count: int) -> list[float]:
        """Half the time there and back, in microseconds, of each tensor."""
        self._ask(_ECHO, size, count)
        out: Any = np.empty(size, np.uint8)
        samples = []
        for at in measure.offsets(size, count, self.total):
            started = time.perf_counter()
            self.there.send_tensor(self.source[at : at + size], timeout=_STEP_WITHIN_S)
            self.back.recv_tensor(out=out, timeout=_STEP_WITHIN_S)
            samples.append((time.perf_counter() - started) / 2 * 1e6)
        return samples

    def _send(self, how: int, size: int, count: int) -> float:
        """GB/s until all has been received and the receiver has said so."""
        self._ask(how, size, count)
        started = time.perf_counter()
        for at in measure.offsets(size, count, self.total):
            self.there.send_tensor(self.source[at : at + size], timeout=_STEP_WITHIN_S)
        self.back.recv_tensor(timeout=_STEP_WITHIN_S)
        return size * count / (time.perf_counter() - started) / 1e9

    def _copy(self, size: int, count: int, copy: Callable[[int], Any]) -> float:
        places = list(measure.offsets(size, count, self.total))
        started = time.perf_counter()
        for at in places:
            copy(at)
        return size * count / (time.perf_counter() - started) / 1e9

    def _copy_over(self, at: int, size: int) -> None:
        self.room[at : at + size] = self.source[at : at + size]

    def _ask(self, what: int, size: int, count: int) -> None:
        self.there.send_tensor(np.array([what, size, count]), timeout=_STEP_WITHIN_S)


# --- the second process -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _second_process(total: int) -> Iterator[tuple[Pipe, Pipe]]:
    back = Pipe.listen()
    command = [sys.executable, "-m", __name__, str(back.address), str(total)]
    # Ctrl-C is for this process, which then ends the other
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 - our own module
    try:
        with Pipe.connect(_address_of(process, back)) as there:
            yield there, back
    finally:
        back.close()
        process.kill()
        process.wait()


def _address_of(process: subprocess.Popen[bytes], back: Pipe) -> str:
    """Where the second process listens; it says so as its first tensor."""
    announced = back.irecv_tensor()
    give_up_at = time.monotonic() + _START_WITHIN_S
    while time.monotonic() < give_up_at and process.poll() is None:
        with contextlib.suppress(TimeoutError):
            return bytes(announced.wait(0.2)).decode()
    state = "has not started in time" if process.poll() is None else f"ended with status {process.returncode}"
    message = f"the second process {state}"
    raise PeerLostError(message)


def _serve(address: str, total: int) -> None:
    """The second process: does what it is asked until the first one closes its pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    room: Any = np.ones(total, np.uint8)
    with Pipe.listen() as asked, Pipe.connect(address) as back:
        back.send_tensor(np.frombuffer(str(asked.address).encode(), np.uint8))
        with contextlib.suppress(EndOfPipeError):
            while True:
                _answer(asked, back, room, asked.recv_tensor().tolist())


def _answer(asked: Pipe, back: Pipe, room: Any, request: tuple[int, int, int]) -> None:
    what, size, count = request
    for at in measure.offsets(size, count, len(room)):
        received = asked.recv_tensor(out=None if what == _RECEIVE_FRESH else room[at : at + size])
        if what == _ECHO:
            back.send_tensor(received)
    if what != _ECHO:
        back.send_tensor(None)


if __name__ == "__main__":
    try:
        _serve(sys.argv[1], int(sys.argv[2]))
    except KVPipeError as error:
        sys.exit(f"the second process of the benchmark: {error}")
