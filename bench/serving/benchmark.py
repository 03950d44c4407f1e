"""Runs `kvpipe bench serving` by its arguments, and shows what it measured."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from bench import machine
from bench.instances import model
from bench.instances.vllm import BLOCK_SIZE, NIXL_ENV, versions
from bench.plot import require
from bench.progress import Progress
from bench.report import write
from bench.serving import plots, report
from bench.serving.measure import Measured, Measurement, Wanted
from bench.serving.results import Findings
from bench.serving.run import LONG_PROMPT_TOKENS, STREAM_TOKENS
from bench.serving.subjects import NAMES, ON_REQUEST, SINGLE, Setting, unavailable_reason
from bench.serving.workload import MIXES, Mix, parse_range
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

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
            write(args.json, report.as_json(_findings(facts, skipped, measured)))

    measurement = Measurement(wanted, setting, Progress(sys.stderr), _report, save)
    _report(f"{', '.join(names)}: {measurement.estimate()}; logs are in {setting.work}")
    measured = measurement.measure_faults() if args.faults else measurement.measure()
    facts |= {"load_average_after": machine.load_average(), "minutes": round((time.monotonic() - began_s) / 60, 1)}
    _show(args, _findings(facts, skipped, measured))
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
            _refuse("--only", args.only, f"expected some of {', '.join(NAMES)}")
    skipped = {name: reason for name in chosen if (reason := unavailable_reason(name, args.nixl_path.absolute()))}
    names = [name for name in chosen if name not in skipped]
    if not names:
        _refuse("--only", args.only, "; ".join(skipped.values()))
    if names == ["nixl"] and not args.rates:
        _refuse("--only", "nixl", "without the others it needs --rates")
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
            _refuse(f"--{option.replace('_', '-')}", value, "expected more than 0")
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
        _refuse(option, text, "expected numbers over 0, separated by commas")
    return found


def _setting(args: argparse.Namespace, wanted: Wanted) -> Setting:
    longest = max(wanted.mix.most_tokens, LONG_PROMPT_TOKENS + STREAM_TOKENS if wanted.has_timeline else 0)
    if longest > min(model.MAX_TOKENS, args.kv_blocks * BLOCK_SIZE):
        _refuse("--kv-blocks", args.kv_blocks, f"a request may have {longest} tokens of {model.MAX_TOKENS}")
    wrong = [text for text in args.env if "=" not in text]
    if wrong:
        _refuse("--env", wrong[0], "expected NAME=VALUE")
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
    for file in (args.json, args.markdown, args.plot, args.timeline):
        if file and not file.absolute().parent.is_dir():
            _refuse("file", file, "there is no such folder")
    if args.plot or args.timeline:
        require()
    num_undivided = sum(name.startswith("undivided") for name in names)
    num_instances = 2 * (num_undivided + args.instances * any(name.startswith("kvpipe") for name in names))
    num_instances += SINGLE in names
    each = _PROCESSES_BYTES + model.weight_bytes(args.layers)
    each += args.kv_blocks * BLOCK_SIZE * model.kv_bytes_per_token(args.layers)
    there, needed = machine.available_bytes(), num_instances * each
    if there is not None and there < needed:
        text = f"{needed / 1e9:.0f} GB for {num_instances} instances, {there / 1e9:.0f} GB are available"
        message = f"needs about {text}; fewer subjects with --only, or fewer --kv-blocks help"
        raise ConfigError(message)


def _refuse(name: str, value: object, expected: str) -> None:
    message = f"{name} {value}: {expected}"
    raise ConfigError(message)


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


def _findings(facts: dict[str, Any], skipped: dict[str, str], measured: Measured) -> Findings:
    return Findings(facts, skipped, measured.slo, measured.cells, measured.timelines, measured.faults)


def _show(args: argparse.Namespace, found: Findings) -> None:
    text = report.text(found)
    sys.stdout.write(f"{text}\n")
    if args.json:
        write(args.json, report.as_json(found))
    if args.markdown:
        write(args.markdown, f"{text}\n")
    if args.plot and found.faults:
        plots.draw_faults(args.plot, found)
    elif args.plot:
        plots.draw_load(args.plot, found)
    if args.timeline and found.timelines:
        plots.draw_timeline(args.timeline, found)
