"""vLLM's own load generator drives the proxy, and counts as `kvpipe bench serving` does."""

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from bench.serving import generator
from bench.serving.workload import Mix, Workload
from tests.e2e.client import Servers
from tests.e2e.groups import tiny_model
from tests.stand_in_completions import StandIn, listening

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 20, 128, 6
# `vllm bench serve` without the command `vllm`, which looks for a distribution of that name; that of CPUs has another.
PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# Of the stand-in. No two of first token, second token and gap are as near to each other as `TOLERANCE`.
FIRST_S, GAP_S = 0.4, 1.2
# A busy machine may add 0.4 s to the median of all first tokens.
TOLERANCE = 2.0


@dataclass(frozen=True)
class Tiny(generator.RoundRobin):
    """Instances of tests, whose model has another name than that of benchmarks."""

    async def post(self, http: aiohttp.ClientSession, number: int, body: dict[str, Any]) -> aiohttp.ClientResponse:
        return await super().post(http, number, body | {"model": "tiny"})


def by_vllm(url: str, folder: Path, rate: float) -> dict[str, Any]:
    """What `vllm bench serve` measures."""
    options = {
        "--backend": "openai",
        "--base-url": url,
        "--endpoint": "/v1/completions",
        "--model": tiny_model(),
        "--served-model-name": "tiny",
        "--dataset-name": "random",
        "--random-input-len": str(PROMPT_TOKENS),
        "--random-output-len": str(OUTPUT_TOKENS),
        "--num-prompts": str(NUM_REQUESTS),
        "--request-rate": str(rate),
        "--result-dir": str(folder),
        "--result-filename": "result.json",
    }
    flags = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
    command = [sys.executable, "-c", PROGRAM, *flags, *(part for option in options.items() for part in option)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "result.json").read_text())


async def by_us(url: str, rate: float) -> list[generator.Outcome]:
    """What `kvpipe bench serving` measures."""
    mix = Mix((PROMPT_TOKENS, PROMPT_TOKENS), (OUTPUT_TOKENS, OUTPUT_TOKENS))
    workload = Workload.draw(1, rate, NUM_REQUESTS, mix)
    return await generator.offer(Tiny([url]), workload, "e2e", 300.0, lambda _: None)


def assert_both_count_all(theirs: dict[str, Any], ours: list[generator.Outcome]) -> None:
    assert (theirs["completed"], theirs["failed"]) == (NUM_REQUESTS, 0)
    assert theirs["output_lens"] == [OUTPUT_TOKENS] * NUM_REQUESTS
    assert [outcome.error for outcome in ours] == [""] * NUM_REQUESTS
    assert [outcome.num_output for outcome in ours] == [OUTPUT_TOKENS] * NUM_REQUESTS


def test_vllm_bench_serve_drives_the_proxy_and_counts_as_our_generator_does(servers: Servers, tmp_path: Path) -> None:
    theirs = by_vllm(servers.url, tmp_path, rate=2.0)
    assert_both_count_all(theirs, asyncio.run(by_us(servers.url, rate=2.0)))


def test_vllm_bench_serve_times_first_tokens_and_gaps_as_our_generator_does(tmp_path: Path) -> None:
    async def both() -> tuple[dict[str, Any], list[generator.Outcome]]:
        # Requests come at once, so that those of both are due when they are sent.
        async with listening(StandIn(first_s=FIRST_S, gap_s=GAP_S)) as instance:
            theirs = await asyncio.to_thread(by_vllm, instance.url, tmp_path, 1000.0)
            return theirs, await by_us(instance.url, rate=1000.0)

    theirs, ours = asyncio.run(both())
    assert_both_count_all(theirs, ours)
    assert [len(gaps) for gaps in theirs["itls"]] == [len(outcome.gaps_s) for outcome in ours]
    for name, pace_s, medians_s in (
        ("ttft", FIRST_S, (median(theirs["ttfts"]), median(outcome.ttft_s or 0.0 for outcome in ours))),
        ("itl", GAP_S, (median(chain(*theirs["itls"])), median(gap for outcome in ours for gap in outcome.gaps_s))),
    ):
        assert all(pace_s / TOLERANCE < found_s < pace_s * TOLERANCE for found_s in medians_s), (name, medians_s)
