"""From which prompt length a split pays: `python -m bench.bench_split`.

Short prompts are sent through the proxy, which splits them, and to decode alone, in turn: once while nothing else runs,
and once beside a stream that decode generates. The stream's longest gap says what a prompt costs the others.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from bench.handoff import client
from bench.instances.model import random_prompt, write_model
from bench.instances.servers import ServerPool
from bench.processes import SubjectError
from bench.report import markdown
from bench.serving import subjects
from bench.serving.subjects import Setting

LENGTHS = (16, 32, 64, 128, 256, 512)
_STREAM_TOKENS = 1500
_BEFORE_S = 0.3
_BEGINS_WITHIN_S = 60.0


@dataclass
class Stream:
    """A stream that decode generates in a thread of its own, until it is told to end.

    Attributes:
        times_s: When its tokens came.
    """

    url: str
    seed: str
    times_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Starts, and returns when the first tokens have come.

        Raises:
            SubjectError: They do not come.
        """
        self._is_over = threading.Event()
        self._has_begun = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        if not self._has_begun.wait(_BEGINS_WITHIN_S):
            message = f"{self.url}: a stream of {len(self.times_s)} tokens after {_BEGINS_WITHIN_S:.0f} s"
            raise SubjectError(message)

    def _run(self) -> None:
        for token_s in client.tokens_s(self.url, random_prompt(64, self.seed), _STREAM_TOKENS):
            self.times_s.append(token_s)
            if len(self.times_s) > 8:  # noqa: PLR2004 - a few tokens of a warm stream
                self._has_begun.set()
            if self._is_over.is_set():
                return

    def end(self) -> None:
        """Ends the stream."""
        self._is_over.set()
        self._thread.join()

    def longest_gap_s(self, from_s: float, to_s: float) -> float:
        """The longest time between two tokens of which one came between these times."""
        gaps = [b - a for a, b in itertools.pairwise(self.times_s) if b >= from_s and a <= to_s]
        return max(gaps, default=0.0)


def main() -> None:
    """Measures each length, split and on decode alone, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="default 7")
    parser.add_argument("--work", type=Path, default=Path(".cache/bench-split"), help="folder for model and logs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    work = args.work.absolute()
    write_model(work / "model")
    setting = Setting(work=work, max_model_len=2048, num_blocks=48, prefill_chunk=2048, decode_chunk=2048, num_a_role=1)
    with ServerPool() as pool:
        group = subjects.start(pool, setting, ["kvpipe"])
        (decode,) = group.instances["decode"]
        urls = {"split": group.proxies["kvpipe"].url, "decode alone": decode.url}
        for length in LENGTHS:  # the lead is learned, and shapes are warm
            for url in urls.values():
                client.stream(url, random_prompt(length, f"warm-up {length} {url}"))
        found = measure(decode.url, urls, args.rounds)
    print(_table(found))
    if args.json:
        facts = machine.machine() | {"load_average_after": machine.load_average()}
        args.json.write_text(json.dumps({**facts, "samples": found}, indent=1))


def measure(decode_url: str, urls: dict[str, str], num_rounds: int) -> list[dict[str, Any]]:
    """Measures every length `num_rounds` times with each subject."""
    found = []
    for number in range(num_rounds):
        for length in LENGTHS:
            for subject, url in urls.items():
                seed = f"{number} {length} {subject}"
                alone = _first_s(url, length, f"alone {seed}")
                stream = Stream(decode_url, f"stream {seed}")
                time.sleep(_BEFORE_S)
                asked_s = time.monotonic()
                beside = _first_s(url, length, f"beside {seed}")
                stream.end()
                sample = {"length": length, "subject": subject, "alone_s": alone, "beside_s": beside}
                gap_s = stream.longest_gap_s(asked_s, time.monotonic())
                usual_s = statistics.median(_gaps(stream.times_s, asked_s))
                found.append(sample | {"gap_s": gap_s, "usual_gap_s": usual_s})
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    return found


def _first_s(url: str, length: int, seed: str) -> float:
    found = client.stream(url, random_prompt(length, seed))
    return found.texts_s[0] - found.asked_s


def _gaps(times_s: list[float], until_s: float) -> list[float]:
    return [b - a for a, b in itertools.pairwise(times_s) if b <= until_s] or [0.0]


def _table(found: list[dict[str, Any]]) -> str:
    subjects = list(dict.fromkeys(sample["subject"] for sample in found))
    columns = [f"{what}, {subject}" for what in ("first token", "beside a stream", "gap") for subject in subjects]
    lines = []
    for length in LENGTHS:
        here = [sample for sample in found if sample["length"] == length]
        cells = [
            _median_ms([sample[key] for sample in here if sample["subject"] == subject])
            for key in ("alone_s", "beside_s", "gap_s")
            for subject in subjects
        ]
        usual = _median_ms([sample["usual_gap_s"] for sample in here])
        lines.append([str(length), *cells, usual])
    return markdown(["tokens", *columns, "usual gap"], lines)


def _median_ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f}" if seconds else ""


if __name__ == "__main__":
    main()
