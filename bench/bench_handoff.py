"""Time to first token through prefill and decode, beside one undivided instance: real vLLM on this machine.

Three proxies stand before one prefill and one decode instance, one for each way of dispatch; they and the undivided
instance are asked in turn, each with prompts of its own that nobody has cached. The model is drawn at random: 16
layers, 16 KV heads of 64, which in float32 is 128 KiB of KV a token.

    python bench/bench_handoff.py --tokens 512,2048 --rounds 10
"""

import argparse
import http.client
import importlib.util
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from kvpipe.deployment import Deployment, DeploymentSpec, DeploymentThread
from kvpipe.proxy.config import Dispatch

REPOSITORY = Path(__file__).parents[1]
MODEL = REPOSITORY / ".cache" / "bench-model"
TOKEN = "the token of the benchmark"  # noqa: S105 - of processes on loopback that end with this one
PAUSE_S = 0.3
LIMIT_S = 300
OUTPUT_TOKENS = 8


@dataclass(frozen=True)
class Sample:
    """Milliseconds from the request to its first and second token, and the proxy's word on the handoff."""

    first_ms: float
    second_ms: float
    status: dict[str, Any]


def make_model() -> None:
    """Draws the model, unless it is there."""
    if (MODEL / "model.safetensors").exists():
        return
    import torch  # noqa: PLC0415 - only where the model is not there yet
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    path = REPOSITORY / "examples" / "disagg_prefill" / "tiny_model.py"
    spec = importlib.util.spec_from_file_location("tiny_model", path)
    tiny_model: Any = importlib.util.module_from_spec(spec) if spec else None
    spec.loader.exec_module(tiny_model)  # type: ignore[union-attr]
    MODEL.mkdir(parents=True, exist_ok=True)
    tiny_model._write_tokenizer(MODEL)  # noqa: SLF001 - the same tokenizer
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 16}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
    config: Any = LlamaConfig(
        vocab_size=tiny_model.VOCAB_SIZE,
        max_position_embeddings=tiny_model.MAX_POSITIONS,
        initializer_range=0.06,
        tie_word_embeddings=False,
        **sizes,
        **heads,
    )
    LlamaForCausalLM(config).save_pretrained(MODEL)


def ask(url: str, prompt: list[int]) -> Sample:
    """Streams one completion."""
    body = {"model": "m", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=LIMIT_S)
    began = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body | {"ignore_eos": True}), headers)
    response = connection.getresponse()
    if response.status != HTTPStatus.OK:
        raise SystemExit(f"error: {url} answered {response.status}: {response.read()[:500]!r}")
    events = (json.loads(line[6:]) for line in response if line.startswith(b"data: {"))
    texts = (event for event in events if any(choice["text"] for choice in event["choices"]))
    times = [(time.perf_counter() - began) * 1e3 for _ in texts]
    handoff = response.headers.get("x-kvpipe-handoff")
    connection.close()
    return Sample(times[0], times[1], status_of(url, handoff) if handoff else {})


def status_of(url: str, handoff: str) -> dict[str, Any]:
    """How a handoff ended."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=LIMIT_S)
    connection.request("GET", f"/status/{handoff}")
    status: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return status


def start_proxies(deployment: Deployment, started: ExitStack) -> dict[str, str]:
    """URL of a proxy for each way of dispatch."""
    prefill, decode = deployment.prefill[0], deployment.decode[0]
    urls = {}
    for dispatch in get_args(Dispatch):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "kvpipe", "proxy", "--port", str(port), "--dispatch", dispatch]
        command += ["--prefill", f"{prefill.url},{prefill.control}", "--decode", f"{decode.url},{decode.control}"]
        process = subprocess.Popen(command, env=os.environ | {"KVPIPE_TOKEN": TOKEN}, stderr=subprocess.DEVNULL)  # noqa: S603
        started.callback(process.wait)
        started.callback(process.terminate)
        urls[dispatch] = f"http://127.0.0.1:{port}"
    time.sleep(2)
    return urls


def measure(urls: dict[str, str], num_tokens: int, rounds: int) -> dict[str, list[Sample]]:
    """Asks all in turn; the first round, which makes connections, does not count."""
    samples: dict[str, list[Sample]] = {name: [] for name in urls}
    for number in range(rounds + 1):
        for name, url in urls.items():
            draw = random.Random(f"{number} {name} {num_tokens}")  # noqa: S311 - a prompt, no secret
            sample = ask(url, draw.choices(range(10, 2000), k=num_tokens))
            if number:
                samples[name].append(sample)
            time.sleep(PAUSE_S)
        print(f"{num_tokens} tokens, round {number} of {rounds}", file=sys.stderr, flush=True)
    return samples


def report(num_tokens: int, samples: dict[str, list[Sample]]) -> None:
    """Prints a table: milliseconds, median and largest, and the median's ratio to the undivided instance's."""
    base = statistics.median(sample.first_ms for sample in samples["undivided"])
    print(f"\n{num_tokens} tokens: ms, median (largest)")
    print("               first token  ratio  second token   hand-over     full and exact")
    for name, found in samples.items():
        first, second = [s.first_ms for s in found], [s.second_ms for s in found]
        handovers = [s.status["handover_ms"] for s in found if s.status]
        handover = f"{statistics.median(handovers):.1f} ({max(handovers):.1f})" if handovers else ""
        whole = [(s.status["result"], s.status["first_token"]) == ("full", "exact") for s in found if s.status]
        print(
            f"{name:13} {statistics.median(first):8.0f} ({max(first):.0f})  {statistics.median(first) / base:.2f}"
            f"  {statistics.median(second):8.0f} ({max(second):.0f})  {handover:>20}  {sum(whole)} of {len(whole)}"
        )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--tokens", default="512", help="lengths of the prompts; default 512")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--step-tokens", default="512", help="most tokens of one step (max-num-batched-tokens)")
    options = parser.parse_args()
    os.environ.update(VLLM_TARGET_DEVICE="cpu", HF_HUB_OFFLINE="1")
    make_model()
    arguments = ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--served-model-name", "m"]
    spec = DeploymentSpec(
        model=str(MODEL),
        num_undivided=1,
        token=TOKEN,
        block_size=32,
        vllm_args=(*arguments, "--max-num-batched-tokens", options.step_tokens),
        proxy_command=None,
    )
    with DeploymentThread(spec, report=lambda text: print(text, file=sys.stderr)) as running, ExitStack() as started:
        urls = {"undivided": running.deployment.undivided[0].url} | start_proxies(running.deployment, started)
        for num_tokens in (int(text) for text in options.tokens.split(",")):
            report(num_tokens, measure(urls, num_tokens, options.rounds))


if __name__ == "__main__":
    main()
