"""The shape of a 1B model on one GPU: first token, latency between tokens and hand-over, beside one instance.

python -m gpu_vllm.shape GROUP --model FOLDER --logs FOLDER --trace FILE --json FILE [--cpu]

The weights are vLLM's own (`--load-format dummy`): times are real, answers mean nothing.
"""

import argparse
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from bench import trace
from bench.handoff.client import Streamed, stream
from bench.handoff.samples import PHASES, exposed
from bench.results import summarize
from gpu_vllm.groups import SHAPES, TOKEN
from gpu_vllm.instances import Asker, chosen_lines, fail, get, prompt, say, spec, until, write
from kvpipe.launch.deployment import DeploymentThread
from kvpipe.launch.ports import free_ports

_NUM_TOKENS, _LOAD_OUTPUT, _LOAD_AT_ONCE, _WARM_ROUNDS = 32, 64, 8, 3


class Plan(NamedTuple):
    """How much is measured: lengths of prompts, requests of each, and requests under load with their length."""

    lengths: tuple[int, ...] = (512, 2048, 4096)
    num_rounds: int = 8
    num_loads: int = 48
    load_tokens: int = 1024


# To rehearse: two layers on two cores.
_ON_CPU = Plan((64,), 1, 8, 64)


def handoff_of(streamed: Streamed) -> str:
    """The id of the handoff; empty without one."""
    return streamed.headers.get("x-kvpipe-handoff", "")


def spread(figures: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile."""
    return {name: round(value, 3) for name, value in asdict(summarize(figures)).items()}


def of_streams(streams: Sequence[Streamed]) -> dict[str, Any]:
    """First token, first to second token, where a hand-over shows, and mean latency between the later ones."""
    times = [(each.asked_s, each.texts_s) for each in streams]
    return {
        "first_ms": spread([1e3 * (texts_s[0] - asked_s) for asked_s, texts_s in times]),
        "second_ms": spread([1e3 * (texts_s[1] - texts_s[0]) for _, texts_s in times]),
        "between_ms": spread([1e3 * (texts_s[-1] - texts_s[1]) / (len(texts_s) - 2) for _, texts_s in times]),
    }


def of_results(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How handoffs ended and their speed, by the consumer's own account."""
    moved = [each for each in results if each.get("bytes") and each.get("transfer_ms")]
    found: dict[str, Any] = {
        key: dict(Counter(str(each.get(key)) for each in results))
        for key in ("result", "transport", "first_token", "computed_tokens")
    }
    if moved:
        found["megabytes"] = spread([each["bytes"] / 1e6 for each in moved])
        found["transfer_ms"] = spread([each["transfer_ms"] for each in moved])
        found["gigabytes_per_s"] = spread([each["bytes"] / 1e6 / each["transfer_ms"] for each in moved])
    return found


def of_trace(events: dict[str, list[trace.Event]], handoffs: Sequence[str]) -> dict[str, Any]:
    """The hand-over: from P's first token to D's first step, by phase."""
    found = [each for handoff in handoffs if (each := exposed(events.get(handoff, [])))]
    if not found:
        return {"handover_ms": None}
    phases = {name: spread([each.phases_ms[at] for each in found]) for at, name in enumerate(PHASES)}
    last = [each.last_block_ms for each in found if each.last_block_ms is not None]
    return {
        "handover_ms": spread([each.total_ms for each in found]),
        "phases_ms": phases,
        "last_block_ms": spread(last) if last else None,
    }


@contextmanager
def sequential_proxy(asker: Asker) -> Iterator[str]:
    """A second proxy, which asks D when P has answered: then a load is all transfer."""
    (port,) = free_ports(1)
    engines = [f"{who.url},{who.control}" for who in (asker.prefill, asker.decode)]
    command = [sys.executable, "-m", "kvpipe", "proxy", "--port", str(port), "--dispatch", "sequential"]
    command += ["--prefill", engines[0], "--decode", engines[1]]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(command, env=os.environ | {"KVPIPE_TOKEN": TOKEN}) as process:  # noqa: S603 - our own
        try:
            until(lambda: _answers(url), 20)
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return bool(get(url, "/health"))
    except OSError:
        return False


def measured(asker: Asker, streams: Sequence[Streamed]) -> dict[str, Any]:
    """The times of streams, how their handoffs ended, and the ids of those."""
    handoffs = [handoff for each in streams if (handoff := handoff_of(each))]
    results = [asker.result(handoff) for handoff in handoffs]
    return of_streams(streams) | (of_results(results) if results else {}) | {"handoffs": handoffs}


def one_at_a_time(asker: Asker, plan: Plan) -> dict[str, Any]:
    """A request at a time: the undivided instance, then P and D by each dispatch, in turn."""
    found: dict[str, Any] = {}
    with sequential_proxy(asker) as sequential:
        ways = {"undivided": asker.undivided.url, "just-in-time": asker.url, "sequential": sequential}
        for length in plan.lengths:
            streams: dict[str, list[Streamed]] = {name: [] for name in ways}
            for number in range(_WARM_ROUNDS + plan.num_rounds):
                for at, (name, url) in enumerate(ways.items()):
                    asked = stream(url, prompt(length, 1000 * number + at), max_tokens=_NUM_TOKENS)
                    if number >= _WARM_ROUNDS:
                        streams[name].append(asked)
            for name, each in streams.items():
                found[f"{length} {name}"] = measured(asker, each)
            say(f"{length} tokens measured")
    return found


def under_load(asker: Asker, plan: Plan) -> dict[str, Any]:
    """Eight requests at a time: the undivided instance, then P and D."""
    found: dict[str, Any] = {}
    for name, url in (("undivided", asker.undivided.url), ("just-in-time", asker.url)):
        with ThreadPoolExecutor(_LOAD_AT_ONCE) as threads:
            began = time.monotonic()
            seeds = range(9000, 9000 + plan.num_loads)
            asked = [
                threads.submit(stream, url, prompt(plan.load_tokens, seed), max_tokens=_LOAD_OUTPUT) for seed in seeds
            ]
            streams = [each.result() for each in asked]
            took = time.monotonic() - began
        found[name] = measured(asker, streams) | {"requests_per_s": round(plan.num_loads / took, 2)}
    return found


def with_trace(found: dict[str, Any], file: Path) -> None:
    """Adds hand-overs to findings, in place of the ids of their handoffs."""
    events = trace.by_handoff(trace.read(file))
    for row in found.values():
        if handoffs := row.pop("handoffs"):
            row.update(of_trace(events, handoffs))


def main(arguments: Sequence[str]) -> int:
    """Starts the group, measures, and writes the findings; 0 if every handoff was as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=SHAPES)
    for option in ("--model", "--logs", "--trace", "--json"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args(arguments)
    group, plan = SHAPES[options.group], _ON_CPU if options.cpu else Plan()
    found: dict[str, Any] = {"group": options.group, "args": group.args, "env": dict(group.env), "wrong": []}
    try:
        began = time.monotonic()
        deployment = spec(group, options.model, options.logs, on_cpu=options.cpu, KVPIPE_TRACE=str(options.trace))
        with DeploymentThread(deployment, report=say) as running:
            found["start_s"] = round(time.monotonic() - began, 1)
            asker = Asker(running)
            found["one at a time"] = one_at_a_time(asker, plan)
            write(options.json, found)
            found["eight at once"] = under_load(asker, plan)
            found["chosen"] = chosen_lines(sorted(options.logs.glob("*.log")))
            asker.close()
        for stage in ("one at a time", "eight at once"):
            with_trace(found[stage], options.trace)
            for name, row in found[stage].items():
                say(f"{stage}, {name}: {row}")
        found["wrong"] = objections(found, "cma" if options.cpu else "cuda_ipc")
    except Exception as error:  # noqa: BLE001 - whatever it was belongs into the findings
        return fail(options.json, found, error)
    write(options.json, found)
    for each in found["wrong"]:
        say(f"wrong: {each}")
    return 1 if found["wrong"] else 0


def objections(found: dict[str, Any], transport: str) -> list[str]:
    """Why handoffs are not as they should be."""
    wrong = []
    for stage in ("one at a time", "eight at once"):
        for name, row in found[stage].items():
            for key, expected in (("result", "full"), ("transport", transport), ("first_token", "exact")):
                if key in row and list(row[key]) != [expected]:
                    wrong.append(f"{stage}, {name}: {key} {row[key]}, not only {expected}")
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
