"""Runs `kvpipe bench serving` by its arguments, and shows what it measured."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from bench import machine
from bench.instances import model
from bench.instances.vllm import BLOCK_SIZE, NIXL_ENV, versions
from bench.options import refuse, require_folders, require_memory
from bench.plot import require
from bench.progress import Progress
from bench.report import as_json, show, write
from bench.serving import plots, report
from bench.serving.measure import Measured, Measurement, Wanted
from bench.serving.results import findings_of
from bench.serving.run import LONG_PROMPT_TOKENS, STREAM_TOKENS
from bench.serving.subjects import NAMES, ON_REQUEST, SINGLE, Setting, unavailable_reason
from bench.serving.workload import MIXES, Mix, parse_range

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from bench.results import Findings

_QUICK = {"only": "kvpipe,undivided-2048", "loads": "0.5", "rounds": 1, "minutes": 5.0, "idle_requests": 3, "layers": 4}
_LOADS, _FAULTS_LOAD = "0.25,0.5,0.75,0.9,1.1", "0.5"
# Memory of an instance without weights and KV: three processes with torch, and a step of 2,048 tokens.
_PROCESSES_BYTES = 1_750_000_000


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark.

    Raises:
        ConfigError: An argument is wrong, or there is too little memory.
        SubjectError: A server did not start, or does not answer.
    """
    began_s = time.monotonic()
    if args.quick:
        vars(args).update(_QUICK)
    if args.instances is None:
        args.instances = 2 if args.faults else 1
    names, skipped = _names(args)
    wanted = _wanted(args, names)
    setting = _setting(args, wanted)
    _check(args, names)
    model.write_model(setting.work / "model", args.layers)
    facts = _facts(args, wanted)

    def save(measured: Measured) -> None:
        if args.json:
            write(args.json, as_json(findings_of(facts, skipped, measured)))

    measurement = Measurement(wanted, setting, Progress(sys.stderr), _report, save)
    _report(f"{', '.join(names)}: {measurement.estimate()}; logs are in {setting.work}")
    measured = measurement.measure_faults() if args.faults else measurement.measure()
    facts |= {"load_average_after": machine.load_average(), "minutes": round((time.monotonic() - began_s) / 60, 1)}
    _show(args, findings_of(facts, skipped, measured), measured)
    if measured.error:
        _report(f"ended early: {measured.error}")
    return 1 if measured.error else 0


def _report(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


# --- arguments --------------------------------------------------------------------------------------------------


def _names(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    chosen = [name for name in NAMES if name not in ON_REQUEST]
    if args.faults:
        chosen = ["kvpipe"]
    elif args.only:
        parts = [part.strip() for part in args.only.split(",")]
        chosen = [name for name in NAMES if name in parts]
        if not chosen or set(parts) - set(NAMES):
            refuse("--only", args.only, f"expected some of {', '.join(NAMES)}")
    skipped = {name: reason for name in chosen if (reason := unavailable_reason(name, args.nixl_path.absolute()))}
    names = [name for name in chosen if name not in skipped]
    if not names:
        refuse("--only", args.only, "; ".join(skipped.values()))
    if names == ["nixl"] and not args.rates:
        refuse("--only", "nixl", "without the others it needs --rates")
    return names, skipped


def _wanted(args: argparse.Namespace, names: Sequence[str]) -> Wanted:
    mix = MIXES[args.mix]
    prompt_tokens, output_tokens = mix.prompt_tokens, mix.output_tokens
    if args.prompt_tokens:
        prompt_tokens = parse_range("--prompt-tokens", args.prompt_tokens)
    if args.output_tokens:
        output_tokens = parse_range("--output-tokens", args.output_tokens)
    for option in ("rounds", "requests", "idle_requests", "minutes", "limit_s", "layers", "fault_interval_s"):
        value = getattr(args, option)
        if value is not None and value <= 0:
            refuse(f"--{option.replace('_', '-')}", value, "expected more than 0")
    return Wanted(
        names=names,
        mix=Mix(prompt_tokens, output_tokens),
        seed=args.seed,
        rates=_numbers("--rates", args.rates) if args.rates else (),
        loads=_numbers("--loads", args.loads or (_FAULTS_LOAD if args.faults else _LOADS)),
        num_requests=args.requests,
        rounds=args.rounds,
        idle_requests=args.idle_requests,
        minutes=args.minutes,
        slo_ttft_ms=args.slo_ttft_ms,
        slo_itl_ms=args.slo_itl_ms,
        limit_s=args.limit_s,
        has_timeline=not args.no_timeline,
        fault_interval_s=args.fault_interval_s,
    )


def _numbers(option: str, text: str) -> list[float]:
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or found[0] <= 0:
        refuse(option, text, "expected numbers over 0, separated by commas")
    return found


def _setting(args: argparse.Namespace, wanted: Wanted) -> Setting:
    longest = max(wanted.mix.most_tokens, LONG_PROMPT_TOKENS + STREAM_TOKENS if wanted.has_timeline else 0)
    if longest > min(model.MAX_TOKENS, args.kv_blocks * BLOCK_SIZE):
        refuse("--kv-blocks", args.kv_blocks, f"a request may have {longest} tokens of {model.MAX_TOKENS}")
    wrong = [text for text in args.env if "=" not in text]
    if wrong:
        refuse("--env", wrong[0], "expected NAME=VALUE")
    return Setting(
        work=args.work.absolute(),
        max_model_len=longest,
        num_blocks=args.kv_blocks,
        prefill_chunk=args.prefill_chunk,
        decode_chunk=args.decode_chunk,
        num_a_role=args.instances,
        nixl_path=args.nixl_path.absolute(),
        nixl_threads=args.nixl_threads,
        env=dict(text.split("=", 1) for text in args.env),
    )


def _check(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuses wrong files and too little memory before anything is started."""
    require_folders(args.json, args.markdown, args.plot, args.timeline)
    if args.plot or args.timeline:
        require()
    num_undivided = sum(name.startswith("undivided") for name in names)
    num_instances = 2 * (num_undivided + args.instances * any(name.startswith("kvpipe") for name in names))
    num_instances += SINGLE in names
    each = _PROCESSES_BYTES + model.weight_bytes(args.layers)
    each += args.kv_blocks * BLOCK_SIZE * model.kv_bytes_per_token(args.layers)
    remedy = "fewer subjects with --only, or fewer --kv-blocks help"
    require_memory(num_instances * each, f"{num_instances} instances", remedy)


# --- output -----------------------------------------------------------------------------------------------------


def _facts(args: argparse.Namespace, wanted: Wanted) -> dict[str, Any]:
    return {
        **machine.machine(),
        "cpu_flags": " ".join(model.cpu_flags()),
        "dtype": model.dtype(),
        "layers": args.layers,
        "kv_per_token_bytes": model.kv_bytes_per_token(args.layers),
        "versions": versions(args.nixl_path),
        "kv_blocks": args.kv_blocks,
        "chunks": f"prefill {args.prefill_chunk}, decode {args.decode_chunk}",
        "env": " ".join(args.env),
        "nixl_settings": " ".join([f"num_threads={args.nixl_threads}", *(f"{k}={v}" for k, v in NIXL_ENV.items())]),
        "prompt_tokens": "{}-{}".format(*wanted.mix.prompt_tokens),
        "output_tokens": "{}-{}".format(*wanted.mix.output_tokens),
        "seed": args.seed,
        "command": " ".join(sys.argv[1:]),
    }


def _show(args: argparse.Namespace, found: Findings, measured: Measured) -> None:
    text = report.text(found)
    show(text, found, args.json)
    if args.markdown:
        write(args.markdown, f"{text}\n")
    if args.plot and measured.faults:
        plots.draw_faults(args.plot, found, measured.cells)
    elif args.plot:
        plots.draw_load(args.plot, found)
    if args.timeline and measured.timelines:
        plots.draw_timeline(args.timeline, found)
