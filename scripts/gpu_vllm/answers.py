"""A group's answers: those through P and D beside those of one instance, greedy and seeded; then P and D are killed.

python -m gpu_vllm.answers GROUP --model FOLDER --logs FOLDER --json FILE [--cpu]
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gpu_vllm.groups import GROUPS, LEASE_S
from gpu_vllm.instances import (
    ALTERNATIVES,
    Asker,
    Body,
    ask,
    chosen_lines,
    completion,
    fail,
    margin,
    metric,
    prompt,
    say,
    spec,
    token_ids,
    until,
    write,
)
from kvpipe.launch.deployment import DeploymentThread

# Of float32, as measured in tests/e2e/identity.py: tokens that are nearer to each other may change places.
TIE = 1e-4
# Of bfloat16 in batches of other sizes: the steps of its numbers between 8 and 16, where logits are, and twice that.
TIE_IN_BATCHES = 0.125
_HOT: Body = {"temperature": 1.2, "top_p": 0.95}
_PENALTIES: Body = {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4}
_LENGTHS = (1, 11, 128, 129, 167, 600, 1500)
_NUM_UNDER_LOAD = 8


def bodies() -> dict[str, Body]:
    """The requests: prompts shorter than a block, of whole blocks, of several steps."""
    found = {f"greedy {length}": completion(prompt(length, 1)) for length in _LENGTHS}
    found |= {f"seeded {length}": completion(prompt(length, 2), seed=length, **_HOT) for length in _LENGTHS}
    return found | {"penalties": completion(prompt(90, 3), seed=5, **_HOT, **_PENALTIES)}


def plain(*, is_seeded: bool) -> dict[str, Body]:
    """Requests that are not asked for alternatives: D continues after P's token, with V1 only those without a seed."""
    if not is_seeded:
        return {f"plain {length}": completion(prompt(length, 21), with_alternatives=False) for length in _LENGTHS}
    found = {
        f"plain seeded {length}": completion(prompt(length, 22), with_alternatives=False, seed=length, **_HOT)
        for length in _LENGTHS
    }
    return found | {
        "plain penalties": completion(prompt(90, 23), with_alternatives=False, seed=5, **_HOT, **_PENALTIES)
    }


def compare(asker: Asker, wanted: dict[str, Body], num_threads: int) -> dict[str, Any]:
    """Asks both; returns how many answers were equal, where others part, and how the handoffs ended."""
    with ThreadPoolExecutor(num_threads) as threads:
        answers = dict(zip(wanted, threads.map(asker.both, wanted.values()), strict=True))
    parted = {}
    for name, (expected, found, _) in answers.items():
        if (how := margin(expected, found)) is not None:
            if how == float("inf"):  # it was not asked for alternatives, with which D computes the last token again
                how = margin(ask(asker.undivided.url, wanted[name] | ALTERNATIVES)[0], found)
            parted[name] = {"margin": how, "expected": token_ids(expected), "found": token_ids(found)}
    results = {name: result for name, (_, _, result) in answers.items()}
    longer = [result for name, result in results.items() if len(wanted[name]["prompt"]) > 1]  # else nothing is moved
    return {
        "asked": len(answers),
        "equal": len(answers) - len(parted),
        "parted": parted,
        "different_answers": len({tuple(token_ids(found)) for _, found, _ in answers.values()}),
        **{key: dict(Counter(str(each.get(key)) for each in longer)) for key in ("result", "transport", "first_token")},
        "computed_tokens": dict(Counter(str(each.get("computed_tokens")) for each in longer)),
        "bytes": sum(int(each.get("bytes", 0)) for each in longer),
        "reasons": sorted({each.get(key, "") for each in longer for key in ("reason", "first_token_reason")} - {""}),
    }


def objections(found: dict[str, Any], *, is_exact: bool, transport: str, computed: str) -> list[str]:
    """Why a comparison is not as it should be. `computed`: prompt tokens that D computes; 0 where it continues.

    Where answers need not be exact, the undivided instance itself may answer otherwise when it is asked again.
    """
    wrong, margins = [], {name: how["margin"] for name, how in found["parted"].items()}
    if is_exact:
        wrongly = [name for name, how in margins.items() if how is None or how > TIE]
    else:
        wrongly = [name for name, how in margins.items() if how is not None and how > TIE_IN_BATCHES]
    if wrongly:
        wrong.append(f"{len(wrongly)} of {found['asked']} answers differ: {', '.join(wrongly)}")
    wanted = {"result": "full", "transport": transport, "first_token": "exact", "computed_tokens": computed}
    for key, expected in wanted.items():
        if list(found[key]) != [expected]:
            wrong.append(f"{key} {found[key]}, not only {expected}")
    return wrong


def warm(asker: Asker) -> dict[str, Any]:
    """First requests, for which Triton compiles kernels; returns the seconds of each."""
    took = {}
    for name, body in (
        ("greedy", completion(prompt(600, 11))),
        ("seeded", completion(prompt(70, 12), seed=1, **_HOT)),
        ("plain", completion(prompt(70, 13), with_alternatives=False)),
    ):
        began = time.monotonic()
        asker.both(body)
        took[name] = round(time.monotonic() - began, 1)
    return took


class Load:
    """Requests under way, eight at a time, and how they end."""

    def __init__(self, url: str, length: int, num_tokens: int, seed: int) -> None:
        prompts = [prompt(length, seed + each) for each in range(_NUM_UNDER_LOAD)]
        self._bodies = [completion(tokens, max_tokens=num_tokens, ignore_eos=True) for tokens in prompts]
        self._threads = ThreadPoolExecutor(_NUM_UNDER_LOAD)
        self._asked = [self._threads.submit(ask, url, body) for body in self._bodies]

    def under_way(self, asker: Asker) -> dict[str, int]:
        """How many requests have no answer yet, and how many of them P and D say that they have."""
        counts = {
            f"{state} at {name}": int(metric(instance, f"vllm:num_requests_{state}"))
            for name, instance in (("P", asker.prefill), ("D", asker.decode))
            for state in ("running", "waiting")
        }
        # Counted last: a request that is without an answer now was under way when they were asked.
        return {**counts, "under way": sum(not asked.done() for asked in self._asked)}

    def outcome(self, asker: Asker, *, knows_results: bool) -> dict[str, Any]:
        """Waits for all; returns how many answers were right, wrong and none, and how handoffs ended where D knows."""
        counts: Counter[str] = Counter()
        errors, margins, handoffs = [], [], []
        for asked, body in zip(self._asked, self._bodies, strict=True):
            try:
                answer, handoff = asked.result()
            except RuntimeError as error:
                counts["no answer"] += 1
                errors.append(str(error)[:200])
                continue
            handoffs += [handoff] if handoff and knows_results else []
            how = margin(ask(asker.undivided.url, body)[0], answer)
            counts["right" if how is None or how <= TIE else "wrong"] += 1
            margins += [] if how is None else [how]
        self._threads.shutdown()
        results = dict(Counter(str(asker.result(handoff).get("result")) for handoff in handoffs))
        return {**counts, "result": results, "margins": margins, "errors": sorted(set(errors))}


def killed_decode(asker: Asker) -> dict[str, Any]:
    """D is killed while it decodes: P gets its blocks back, and a new D answers."""
    load = Load(asker.url, 300, 400, 100)
    until(lambda: metric(asker.decode, "vllm:num_requests_running") > 0, 20)
    at_death, began = load.under_way(asker), time.monotonic()
    asker.running.call(asker.decode.child.stop(0))
    found = at_death | load.outcome(asker, knows_results=False)
    freed = until(lambda: metric(asker.prefill, "vllm:kv_cache_usage_perc") == 0, LEASE_S + 10)
    found |= {"prefill_holds_no_block": bool(freed), "freed_after_s": round(time.monotonic() - began, 1)}
    say(f"D killed: {found}; starting it again")
    asker.running.call(asker.running.deployment.restart(asker.decode))
    again = compare(asker, {f"again {length}": completion(prompt(length, 7)) for length in (90, 700)}, 1)
    return found | {"again": again}


def killed_prefill(asker: Asker) -> dict[str, Any]:
    """P is killed while it computes: D computes what has not come."""
    load = Load(asker.url, 3600, 64, 200)
    until(lambda: metric(asker.prefill, "vllm:num_requests_running") > 0, 20)
    at_death = load.under_way(asker)
    asker.running.call(asker.prefill.child.stop(0))
    found = at_death | load.outcome(asker, knows_results=True)
    freed = until(lambda: metric(asker.decode, "vllm:kv_cache_usage_perc") == 0, LEASE_S + 10)
    return found | {"decode_holds_no_block": bool(freed)}


def wrong_after_deaths(name: str, found: dict[str, Any]) -> list[str]:
    """Why an instance's death is not as it should be."""
    wrong = [f"{name}: {found['wrong']} wrong answers"] if found.get("wrong") else []
    if name == "prefill killed" and found.get("no answer"):
        wrong.append(f"{name}: {found['no answer']} requests without an answer: {found['errors'][:2]}")
    if not found["under way"]:
        wrong.append(f"{name}: too late, no request was under way")
    if found["result"].get("full", 0) == _NUM_UNDER_LOAD:
        wrong.append(f"{name}: too late, all KV had come")
    wrong += [f"{name}: not {key}" for key, value in found.items() if key.endswith("holds_no_block") and not value]
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Starts the group, asks, and writes the findings; 0 if all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    for option in ("--model", "--logs", "--json"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args(arguments)
    group, transport = GROUPS[options.group], "cma" if options.cpu else "cuda_ipc"
    is_exact = group.is_exact or options.cpu
    # Log probabilities need P's token to be sampled here too.
    computed = {"one at a time": "1", "continuing seeded": "0" if group.uses_v2 and not options.cpu else "1"}
    found: dict[str, Any] = {"group": options.group, "args": group.args, "env": dict(group.env), "wrong": []}
    try:
        began = time.monotonic()
        with DeploymentThread(spec(group, options.model, options.logs, on_cpu=options.cpu), report=say) as running:
            found["start_s"] = round(time.monotonic() - began, 1)
            asker = Asker(running)
            found["warm_s"] = warm(asker)
            stages: dict[str, Callable[[], dict[str, Any]]] = {
                "one at a time": lambda: compare(asker, bodies(), 1),
                "continuing": lambda: compare(asker, plain(is_seeded=False), 1),
                "continuing seeded": lambda: compare(asker, plain(is_seeded=True), 1),
                "eight at once": lambda: compare(asker, many(), _NUM_UNDER_LOAD),
            }
            if group.has_deaths:
                stages |= {
                    "decode killed": lambda: killed_decode(asker),
                    "prefill killed": lambda: killed_prefill(asker),
                }
            for name, stage in stages.items():
                found[name] = stage()
                if "killed" in name:
                    found["wrong"] += wrong_after_deaths(name, found[name])
                    if again := found[name].get("again"):
                        wrong = objections(again, is_exact=is_exact, transport=transport, computed="1")
                        found["wrong"] += [f"{name}, again: {each}" for each in wrong]
                else:
                    num_computed = computed.get(name, "0")
                    # A batch of another size is rounded otherwise.
                    is_equal = is_exact or name != "eight at once"
                    wrong = objections(found[name], is_exact=is_equal, transport=transport, computed=num_computed)
                    found["wrong"] += [f"{name}: {each}" for each in wrong]
                found["chosen"] = chosen_lines(sorted(options.logs.glob("*.log")))
                write(options.json, found)
                say(f"{name}: { ({key: value for key, value in found[name].items() if key != 'parted'}) }")
            asker.close()
    except Exception as error:  # noqa: BLE001 - whatever it was belongs into the findings
        return fail(options.json, found, error)
    for each in found["wrong"]:
        say(f"wrong: {each}")
    return 1 if found["wrong"] else 0


def many() -> dict[str, Body]:
    """Requests that are asked at once."""
    prompts = {f"at once {seed}": prompt(60 + 97 * seed, 50 + seed) for seed in range(_NUM_UNDER_LOAD)}
    return {name: completion(tokens, with_alternatives=False) for name, tokens in prompts.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
