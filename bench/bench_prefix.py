"""Prompts that share a prefix, through prefill's prefix cache: `python -m bench.bench_prefix`.

Several questions about each of a few documents, one request at a time, in an order that is the same for all subjects.
Prefill has one prefix cache for all decodes. Behind round robin, each undivided instance computes each document itself.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bench import machine
from bench.handoff import client
from bench.instances import model
from bench.instances.servers import ServerPool, resumed
from bench.instances.vllm import BLOCK_SIZE
from bench.report import markdown
from bench.serving import subjects
from bench.serving.subjects import Setting

if TYPE_CHECKING:
    from bench.serving.subjects import Group

NAMES = ("kvpipe", "undivided-2048")
NUM_DOCUMENTS, NUM_QUESTIONS = 4, 5
QUESTION_TOKENS = 128


def main() -> None:
    """Measures rounds of new documents, with each subject in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--document-tokens", type=int, default=896, help="default 896")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--work", type=Path, default=Path(".cache/bench-prefix"), help="folder for model and logs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    work = args.work.absolute()
    model.write_model(work / "model")
    num_tokens = args.document_tokens + QUESTION_TOKENS
    # Documents and questions of two rounds.
    num_blocks = 2 * NUM_DOCUMENTS * -(-(args.document_tokens + NUM_QUESTIONS * QUESTION_TOKENS) // BLOCK_SIZE)
    setting = Setting(
        work=work,
        max_model_len=num_tokens + client.OUTPUT_TOKENS,
        num_blocks=num_blocks,
        prefill_chunk=2048,
        decode_chunk=2048,
        num_a_role=1,
    )
    found: dict[str, dict[int, list[float]]] = {name: {} for name in NAMES}
    with ServerPool() as pool:
        groups = {}
        for name in NAMES:
            groups[name] = subjects.start(pool, setting, [name])
            with resumed(groups[name].servers):
                _round(name, groups[name], "warm-up", args.document_tokens)
        for number in range(args.rounds):
            for name in NAMES:
                with resumed(groups[name].servers):
                    for asked, times_s in _round(name, groups[name], str(number), args.document_tokens).items():
                        found[name].setdefault(asked, []).extend(times_s)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    print(_table(found))
    if args.json:
        facts = machine.machine() | {"load_average_after": machine.load_average()}
        args.json.write_text(json.dumps({**facts, "first_tokens_s": found}, indent=1))


def _round(name: str, group: Group, seed: str, num_tokens: int) -> dict[int, list[float]]:
    """Times to the first token, by how often the document had been asked about."""
    order = [document for document in range(NUM_DOCUMENTS) for _ in range(NUM_QUESTIONS)]
    random.Random(seed).shuffle(order)  # noqa: S311 - no secret
    urls = [proxy.url for proxy in group.proxies.values()] or [server.url for server in group.servers]
    times_s: dict[int, list[float]] = {}
    asked = [0] * NUM_DOCUMENTS
    for number, document in enumerate(order):
        prompt = model.random_prompt(num_tokens, f"{seed} document {document}")
        prompt += model.random_prompt(QUESTION_TOKENS, f"{seed} {name} question {number}")
        found = client.stream(urls[number % len(urls)], prompt)
        times_s.setdefault(asked[document], []).append(found.texts_s[0] - found.asked_s)
        asked[document] += 1
    return times_s


def _table(found: dict[str, dict[int, list[float]]]) -> str:
    lines = [
        [name, *(f"{1e3 * statistics.median(times_s[asked]):.0f} ms" for asked in range(NUM_QUESTIONS))]
        for name, times_s in found.items()
    ]
    return markdown(["first token", *(f"question {asked + 1}" for asked in range(NUM_QUESTIONS))], lines)


if __name__ == "__main__":
    main()
