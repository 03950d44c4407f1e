"""`kvpipe bench store --vllm`: arguments and results."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench import machine
from bench.handoff.run import report
from bench.instances import model
from bench.instances.vllm import versions
from bench.measure import Case
from bench.options import refuse, require_memory
from bench.processes import SubjectError
from bench.results import Findings, Row, median_ratio, summarize
from bench.reuse import lmcache
from bench.reuse.run import Rounds
from bench.reuse.subjects import CHUNK_TOKENS, NO_STORE, OURS, Setting
from bench.subjects import LMCACHE_PYTHON
from bench.transports import labels_of, row_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from bench.reuse.run import Reuse
    from bench.reuse.subjects import Subject

SUBJECTS = OURS | lmcache.SUBJECTS
# Weights 0.4 GB, KV 0.3 GB, and the memory of three processes with torch.
_BYTES_PER_INSTANCE = 2_500_000_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add(
        "--vllm",
        action="store_true",
        help="measure real vLLM instead: time to the first token of a prompt that is asked twice; needs vLLM",
    )
    add("--tokens", type=int, default=4096, metavar="N", help="with --vllm: of a prompt; default 4096")
    add(
        "--lmcache",
        type=Path,
        default=os.environ.get(LMCACHE_PYTHON) or None,
        metavar="PYTHON",
        help=f"with --vllm: of an environment with vLLM and LMCache; default ${LMCACHE_PYTHON}",
    )
    add("--work", type=Path, default=Path(".cache/bench-reuse"), help="with --vllm: folder for model and logs")


def measure(args: argparse.Namespace) -> Findings:
    """Measures the subjects that `--only` selects, and an instance without a store.

    Raises:
        ConfigError: An argument is wrong, or there is too little memory.
        SubjectError: A server did not start, or did not answer.
    """
    if not CHUNK_TOKENS < args.tokens <= model.MAX_TOKENS // 2:
        refuse("--tokens", args.tokens, f"expected more than {CHUNK_TOKENS}, and at most {model.MAX_TOKENS // 2}")
    setting = Setting(args.work.absolute(), args.tokens, args.tokens * model.kv_bytes_per_token(), args.lmcache)
    names, skipped = _names(args.only, setting)
    memory = len(names) * _BYTES_PER_INSTANCE
    require_memory(memory, f"{len(names)} instances", "fewer subjects with --only help")
    facts = machine.machine() | {
        "cpu_flags": " ".join(model.cpu_flags()),
        "dtype": model.dtype(),
        "tokens": args.tokens,
        "kv_per_token_bytes": model.kv_bytes_per_token(),
        "chunk_tokens": CHUNK_TOKENS,
        "rounds": args.rounds,
        "versions": versions(Path()),
    }
    if setting.lmcache and lmcache.SUBJECTS.keys() & names:
        facts["lmcache_versions"] = lmcache.versions(setting.lmcache)
    model.write_model(setting.work / "model")
    with ExitStack() as stack:
        rounds = Rounds(_start(names, setting, stack, skipped), args.tokens, report, skipped)
        rounds.measure(args.rounds)
    facts["load_average_after"] = machine.load_average()
    return Findings(facts, rows_of(rounds.found, setting.kv_bytes), skipped)


def _names(only: str | None, setting: Setting) -> tuple[list[str], dict[str, str]]:
    """Returns the subjects, and why others that were wanted are left out."""
    wanted = [part.strip().lower() for part in only.split(",")] if only else [""]
    chosen = [name for name in SUBJECTS if name != NO_STORE and any(part in name.lower() for part in wanted)]
    if not chosen:
        refuse("--only", only, f"expected parts of {'; '.join(SUBJECTS)}")
    reasons = {name: SUBJECTS[name].unavailable_reason(setting) for name in chosen}
    if all(reasons.values()):
        refuse("--only", only, reasons[chosen[0]])
    skipped = {name: reason for name, reason in reasons.items() if reason}
    return [NO_STORE, *(name for name in chosen if name not in skipped)], skipped


def _start(names: Sequence[str], setting: Setting, stack: ExitStack, skipped: dict[str, str]) -> list[Subject]:
    """Starts the subjects, each with a stack of its own. One that is not ours and fails is added to `skipped`."""
    subjects = []
    for name in names:
        report(f"starting {name}")
        own = stack.enter_context(ExitStack())
        try:
            subject = SUBJECTS[name].start(own, setting)
            subject.instance.until_healthy()
        except SubjectError as error:
            if name in OURS:
                raise
            own.close()
            skipped[name] = str(error)
        else:
            subjects.append(subject)
    return subjects


def rows_of(found: Mapping[str, Sequence[Reuse]], kv_bytes: int) -> list[Row]:
    """Rows for the first time and the second, each with its ratio to the instance without a store."""
    rows, gib = [], kv_bytes / (1 << 30)
    for kind in ("first ask", "second ask"):
        base = [reuse.of(kind) for reuse in found[NO_STORE]]
        for name, reuses in found.items():
            asks = [reuse.of(kind) for reuse in reuses]
            times = [ask.first_token_ms for ask in asks]
            rows.append(
                row_of(
                    labels_of(Case(kind, kv_bytes), name, ""),
                    transport=f"{min(ask.num_loaded for ask in asks)} tokens loaded" if kind == "second ask" else "",
                    value=summarize(times),
                    cpu_s_per_gib=summarize([ask.cpu_s / gib for ask in asks]),
                    ratio=median_ratio(times, [ask.first_token_ms for ask in base]),
                    baseline=NO_STORE,
                )
            )
    return rows
