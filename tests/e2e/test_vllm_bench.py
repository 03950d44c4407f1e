"""vLLM's own load generator drives the proxy, and counts as `kvpipe bench serving` does."""

import asyncio
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from kvpipe.bench.serving import generator
from kvpipe.bench.serving.workload import Mix, Workload
from tests.e2e.client import Servers
from tests.e2e.groups import tiny_model

RATE, NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 2.0, 60, 128, 16
# `vllm bench serve` without the command `vllm`, which looks for a distribution of that name; that of CPUs has another.
PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
# Both measure the same for half a minute each, while other tests may have the CPUs.
NOISE = 3.0


@dataclass(frozen=True)
class Tiny(generator.RoundRobin):
    """The proxy of the tests, whose model has another name than that of benchmarks."""

    async def post(self, http: aiohttp.ClientSession, number: int, body: dict[str, Any]) -> aiohttp.ClientResponse:
        return await super().post(http, number, body | {"model": "tiny"})


def by_vllm(url: str, folder: Path) -> dict[str, Any]:
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
        "--request-rate": str(RATE),
        "--result-dir": str(folder),
        "--result-filename": "result.json",
    }
    flags = ["--ignore-eos", "--disable-tqdm", "--save-result"]
    command = [sys.executable, "-c", PROGRAM, *flags, *(part for option in options.items() for part in option)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads((folder / "result.json").read_text())


def test_vllm_bench_serve_drives_the_proxy_and_counts_as_our_generator_does(servers: Servers, tmp_path: Path) -> None:
    theirs = by_vllm(servers.url, tmp_path)
    mix = Mix((PROMPT_TOKENS, PROMPT_TOKENS), (OUTPUT_TOKENS, OUTPUT_TOKENS))
    workload = Workload.draw(1, RATE, NUM_REQUESTS, mix)
    ours = asyncio.run(generator.offer(Tiny([servers.url]), workload, "e2e", 300.0, lambda _: None))

    assert (theirs["completed"], theirs["failed"]) == (NUM_REQUESTS, 0)
    assert theirs["total_output_tokens"] == NUM_REQUESTS * OUTPUT_TOKENS
    assert [outcome.error for outcome in ours] == [""] * NUM_REQUESTS
    assert sum(outcome.num_output for outcome in ours) == NUM_REQUESTS * OUTPUT_TOKENS

    ttft_ms = 1e3 * median(outcome.ttft_s for outcome in ours if outcome.ttft_s is not None)
    itl_ms = 1e3 * median(gap for outcome in ours for gap in outcome.gaps_s)
    for name, own_ms in (("ttft", ttft_ms), ("itl", itl_ms)):
        assert 1 / NOISE < theirs[f"median_{name}_ms"] / own_ms < NOISE, (name, theirs[f"median_{name}_ms"], own_ms)
