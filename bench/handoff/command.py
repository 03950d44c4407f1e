"""`kvpipe bench handoff`: arguments and output."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench import machine, timeline, trace
from bench.handoff import report, run, samples
from bench.handoff.subjects import DEFAULT_GROUPS, GROUPS, Setting, unavailable_reason
from bench.instances import model
from bench.instances.servers import ServerPool
from bench.instances.vllm import NIXL_ENV, versions
from bench.options import refuse, require_folders, require_memory
from bench.plot import require
from bench.report import show
from bench.results import Findings
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    import argparse

SUMMARY = "real vLLM through prefill and decode: hand-over, first token and CPU, beside NixlConnector and one instance"
# Weights 0.7 GB, KV up to 0.7 GB, and the memory of three processes with torch.
_BYTES_PER_INSTANCE = 2_800_000_000
_LONGEST_PREFILL_S = 15.0
_DRAWN = "kvpipe just-in-time"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--tokens", default="512,2048,4096", help="lengths of prompts; default 512,2048,4096")
    add("--rounds", default="20,10,10", help="requests of each subject at these lengths; default 20,10,10")
    add(
        "--minutes", type=float, default=45, help="time for all lengths, with at least three rounds of each; default 45"
    )
    groups = f"groups whose names contain one of these: {', '.join(GROUPS)}; default all but validate"
    add("--only", metavar="NAMES", help=f"{groups}, kvpipe with integrity=validate")
    add("--omp-threads", type=int, default=os.cpu_count(), metavar="N", help="of each worker; default: all CPUs")
    add("--step-tokens", type=int, default=512, metavar="N", help="most tokens of one step of vLLM; default 512")
    add("--nixl-threads", type=int, default=4, metavar="N", help="num_threads of NixlConnector; default 4, as its own")
    add(
        "--nixl-path", type=Path, default=Path(".cache/nixl"), help="folder of NIXL, if it is not installed beside vLLM"
    )
    add("--idle-s", type=float, default=10, metavar="S", help="seconds for measuring idle workers; default 10")
    add("--work", type=Path, default=Path(".cache/bench-handoff"), help="folder for model, logs and trace")
    add("--json", type=Path, metavar="FILE", help="write the figures here too")
    add("--plot", type=Path, metavar="FILE.png", help="draw them; needs matplotlib")
    add("--timeline", type=Path, metavar="FILE.png", help="draw one just-in-time handoff layer by layer")


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark.

    Raises:
        ConfigError: An argument is wrong, or there is too little memory.
        SubjectError: A server did not start, or did not answer.
    """
    began_s = time.monotonic()
    lengths = _lengths(args)
    names, skipped = _names(args)
    require_folders(args.json, args.plot, args.timeline)
    if args.plot or args.timeline:
        require()
    longest = max(num_tokens for num_tokens, _ in lengths)
    work = args.work.absolute()
    nixl = (args.nixl_threads, args.nixl_path.absolute())
    setting = Setting(work, args.omp_threads, args.step_tokens, *nixl, longest)
    model.write_model(work / "model")
    setting.trace.unlink(missing_ok=True)
    facts = _facts(args)
    end_at = began_s + 60 * args.minutes
    with ServerPool() as pool:
        running = run.start(pool, setting, names)
        running.idle_workers(args.idle_s)
        _measure(running, lengths, end_at)
        requests = running.samples(setting)
    facts |= {"load_average_after": machine.load_average(), "minutes": round((time.monotonic() - began_s) / 60, 1)}
    rows = samples.rows_of(requests, model.kv_bytes_per_token())
    prefill = {"prefill_s": running.prefill_s, "plain_s": running.plain_s, "prefill_tokens": lengths[0][0]}
    found = Findings(facts, rows, skipped, {"samples": requests, **prefill, "idle": running.idle})
    show(report.text(found), found, args.json)
    if args.plot:
        report.draw(args.plot, found)
    if args.timeline:
        life = _median_handoff(requests, setting)
        timeline.draw(args.timeline, life, f"a handoff of {rows[-1]['num_tokens']} tokens, {_DRAWN}")
    return 0


def _measure(running: run.Run, lengths: list[tuple[int, int]], end_at: float) -> None:
    """Measures each length in its share of the time; leaves out lengths whose prefill takes too long."""
    for index, (num_tokens, num_rounds) in enumerate(lengths):
        if index and running.seconds_of_prefill(num_tokens) > _LONGEST_PREFILL_S:
            run.report(f"{num_tokens} tokens: left out, prefill alone takes over {_LONGEST_PREFILL_S:.0f} s")
            continue
        left = sum(rounds for _, rounds in lengths[index:])
        now = time.monotonic()
        share_s = (end_at - now) * num_rounds / left
        running.rounds(num_tokens, num_rounds, now + share_s, times_prefill=index == 0)


def _lengths(args: argparse.Namespace) -> list[tuple[int, int]]:
    try:
        tokens, rounds = ([int(part) for part in text.split(",")] for text in (args.tokens, args.rounds))
    except ValueError as error:
        message = f"--tokens {args.tokens} --rounds {args.rounds}: expected numbers, separated by commas"
        raise ConfigError(message) from error
    rounds += rounds[-1:] * (len(tokens) - len(rounds))
    if min(tokens) < 1 or max(tokens) > model.MAX_TOKENS // 2 or min(rounds) < 1:
        message = f"--tokens {args.tokens} --rounds {args.rounds}: expected 1 to {model.MAX_TOKENS // 2}, and 1 or more"
        raise ConfigError(message)
    return list(zip(tokens, rounds, strict=False))


def _names(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    wanted = args.only.split(",") if args.only else DEFAULT_GROUPS
    chosen = [name for name in GROUPS if any(part.strip() in name for part in wanted)]
    if not chosen:
        refuse("--only", args.only, f"expected some of {', '.join(GROUPS)}")
    skipped = {name: reason for name in chosen if (reason := unavailable_reason(name, args.nixl_path))}
    names = [name for name in chosen if name not in skipped]
    num_instances = sum(1 if name == "undivided" else 2 for name in names)
    memory = num_instances * _BYTES_PER_INSTANCE
    require_memory(memory, f"{num_instances} instances", "fewer groups with --only help")
    return names, skipped


def _facts(args: argparse.Namespace) -> dict[str, object]:
    return {
        **machine.machine(),
        "cpu_flags": " ".join(model.cpu_flags()),
        "dtype": model.dtype(),
        "kv_per_token_bytes": model.kv_bytes_per_token(),
        "omp_threads": args.omp_threads,
        "step_tokens": args.step_tokens,
        "versions": versions(args.nixl_path),
        "nixl_settings": " ".join([f"num_threads={args.nixl_threads}", *(f"{k}={v}" for k, v in NIXL_ENV.items())]),
    }


def _median_handoff(requests: list[samples.Sample], setting: Setting) -> list[trace.Event]:
    """Returns the events of the handoff with the median hand-over, among the longest prompts."""
    longest = max(sample.num_tokens for sample in requests)
    found = [
        (sample.exposed.total_ms, sample.handoff)
        for sample in requests
        if (sample.subject, sample.num_tokens) == (_DRAWN, longest) and sample.exposed
    ]
    if not found:
        message = f"no handoff of {_DRAWN} was complete: there is no timeline to draw"
        raise ConfigError(message)
    handoff = sorted(found)[len(found) // 2][1]
    return trace.by_handoff(trace.read(setting.trace))[handoff]
