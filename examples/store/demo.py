"""A prefill and a decode instance that share only a store: the same answers as one instance, and prompts computed once?

Makes a tiny model, starts a store, one prefill and one decode instance, the proxy and an undivided instance, and sends
each request twice to the proxy and once to the undivided instance. The exit status is 1 unless all answers are
identical, and the decode instance has loaded each whole prompt from the store.

    python examples/store/demo.py                                    # with a store of its own
    python examples/store/demo.py --store redis://127.0.0.1:6379     # with a Redis or Valkey that runs already
"""

import argparse
import asyncio
import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY / "examples" / "disagg_prefill"))

from tiny_model import make_tiny_model  # noqa: E402 - it is beside the other demo

from kvpipe.exceptions import KVPipeError  # noqa: E402 - as above
from kvpipe.launch.deployment import Deployment, DeploymentSpec  # noqa: E402 - as above
from kvpipe.launch.spec import OWN_STORE  # noqa: E402 - as above

LOG_DIR = REPOSITORY / ".cache" / "store-demo-logs"
MODEL = "tiny"
BLOCK_SIZE, CHUNK_SIZE = 32, 64
LENGTHS = (CHUNK_SIZE - 1, CHUNK_SIZE, 3 * CHUNK_SIZE + 7, 10 * CHUNK_SIZE, 20 * CHUNK_SIZE + 33)
MAX_TOKENS = 24
# float32: in bfloat16 the last tokens of a prompt round differently when they are computed alone
VLLM_ARGS = ("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager")
HEADINGS = ("prompt", "loaded by D", "first ask", "second ask", "identical")


async def main() -> int:
    """Runs the demo and returns its exit status."""
    parser = argparse.ArgumentParser(description="Compare a pair that shares a store with one instance.")
    parser.add_argument("--store", default=OWN_STORE, metavar="URL", help="a store that runs already")
    args = parser.parse_args()
    model = make_tiny_model()
    LOG_DIR.mkdir(parents=True, exist_ok=True)
    spec = DeploymentSpec(
        model=str(model),
        num_undivided=1,
        block_size=BLOCK_SIZE,
        store=args.store,
        # A tiny model computes faster than any store answers: without this, it would compute.
        connector_config={"chunk_size": CHUNK_SIZE, "always_load": True},
        token=os.environ.get("KVPIPE_TOKEN") or secrets.token_hex(16),
        vllm_args=(*VLLM_ARGS, "--served-model-name", MODEL),
        env={"VLLM_NO_USAGE_STATS": "1"},
        log_dir=LOG_DIR,
    )
    say(f"starting the store and 3 vLLM instances (minutes); logs in {LOG_DIR}")
    async with Deployment(spec, report=say) as deployment, aiohttp.ClientSession() as session:
        rows = [await compare(session, deployment, prompt) for prompt in prompts(model)]
    for row in (HEADINGS, *rows):
        print("  ".join(cell.rjust(len(heading)) for cell, heading in zip(row, HEADINGS, strict=True)))
    is_good = all(row[-1] == "yes" and row[0] == row[1] for row in rows)
    print("all answers are identical, and all KV came from the store" if is_good else "NOT as it should be")
    return 0 if is_good else 1


def prompts(model: Path) -> list[list[int]]:
    """Prompts of token ids; none is the prefix of another."""
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(Path(asyncio.tasks.__file__).read_text()).ids
    return [ids[start : start + length] for start, length in zip(range(0, 5000, 500), LENGTHS, strict=False)]


async def compare(session: aiohttp.ClientSession, deployment: Deployment, prompt: list[int]) -> tuple[str, ...]:
    """Asks twice through the store and once without; returns a row of the table."""
    decode = deployment.decode[0].url
    loaded = await num_loaded(session, decode)
    first, first_s = await ask(session, deployment.url, prompt)
    loaded = await num_loaded(session, decode) - loaded
    second, second_s = await ask(session, deployment.url, prompt)
    alone, _ = await ask(session, deployment.undivided[0].url, prompt)
    is_identical = bool(alone) and first == second == alone
    times = (f"{first_s * 1000:.0f} ms", f"{second_s * 1000:.0f} ms")
    return (str(len(prompt)), str(loaded), *times, "yes" if is_identical else "NO")


async def ask(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> tuple[Any, float]:
    """Sends a request; returns text and token ids, and the seconds it took."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "return_token_ids": True}
    began = time.monotonic()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:  # noqa: PLR2004 - HTTP's
            message = f"{url}: HTTP {response.status}: {await response.text()}"
            raise KVPipeError(message)
        choice = json.loads(await response.text())["choices"][0]
    return (choice["text"], choice["token_ids"]), time.monotonic() - began


async def num_loaded(session: aiohttp.ClientSession, url: str) -> int:
    """The tokens whose KV an instance has had from outside so far, as vLLM counts them."""
    async with session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return int(
        sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total"))
    )


def say(text: str) -> None:
    """Progress goes to stderr, the table to stdout."""
    print(f"store demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        sys.exit(asyncio.run(main()))
    except KVPipeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
