"""`kvpipe bench serving`: its options, without what it needs: the other benchmarks run where that is missing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bench.instances import model
from bench.instances.vllm import BLOCK_SIZE
from bench.serving.workload import MIXES
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    import argparse

SUMMARY = "many requests at once to real vLLM: TTFT, ITL and goodput, beside undivided instances and NixlConnector"
# 64 KiB of KV a token, with which eight instances fit into 24 GB.
_LAYERS = {"bfloat16": model.NUM_LAYERS, "float32": model.NUM_LAYERS // 2}
_NAMES = "kvpipe, kvpipe-late (without early token), undivided-2048, undivided-512, undivided-128 (chunks), nixl"
_ON_REQUEST = "kvpipe-queue (through a RabbitMQ broker), single-2048 (one instance)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    add = parser.add_argument
    add("--only", metavar="NAMES", help=f"subjects: {_NAMES}, which are the default; {_ON_REQUEST}")
    add(
        "--quick",
        action="store_true",
        help="kvpipe and undivided-2048 with 4 layers, at one rate, in one round: 5 minutes",
    )
    add("--faults", action="store_true", help="kvpipe alone, while instances are killed and restarted")
    workload = parser.add_argument_group("workload")
    add = workload.add_argument
    add("--mix", choices=MIXES, default="mixed", help="lengths of prompts and outputs; default mixed")
    add("--prompt-tokens", metavar="LO:HI", help="lengths of prompts, instead of the mix's")
    add("--output-tokens", metavar="LO:HI", help="lengths of outputs, instead of the mix's")
    shares = "default 0.25,0.5,0.75,0.9,1.1; with --faults 0.5 of kvpipe's own"
    add("--loads", metavar="LIST", help=f"rates by undivided-2048's saturation; {shares}")
    add("--rates", metavar="LIST", help="rates in requests/s instead; no search for the saturation")
    add("--requests", type=int, metavar="N", help="of each subject, rate and round; default: what fits into --minutes")
    add("--minutes", type=float, default=100.0, help="time for everything; default 100")
    add("--rounds", type=int, default=3, metavar="N", help="repetitions of the same arrivals; default 3")
    add("--idle-requests", type=int, default=6, metavar="N", help="requests one at a time, at first; default 6")
    add("--seed", type=int, default=1, help="of arrivals, lengths and prompts; default 1")
    add("--limit-s", type=float, default=300.0, metavar="S", help="a request fails after this time; default 300")
    add("--slo-ttft-ms", type=float, metavar="MS", help="default: 4 times that of undivided-2048 when idle")
    add("--slo-itl-ms", type=float, metavar="MS", help="default: twice that of undivided-2048 when idle")
    add("--fault-interval-s", type=float, default=20.0, metavar="S", help="between two kills; default 20")
    add("--no-timeline", action="store_true", help="no stream beside a long prompt")
    instances = parser.add_argument_group("instances")
    add = instances.add_argument
    layers = f"of the model; default {_LAYERS['bfloat16']} in bfloat16, {_LAYERS['float32']} in float32"
    add("--layers", type=int, default=_LAYERS[model.dtype()], metavar="N", help=layers)
    add("--kv-blocks", type=int, default=64, metavar="N", help=f"of {BLOCK_SIZE} tokens, each instance; default 64")
    add("--prefill-chunk", type=int, default=2048, metavar="N", help="most tokens of a step of P; default 2048")
    add("--decode-chunk", type=int, default=2048, metavar="N", help="most tokens of a step of D; default 2048")
    add("--instances", type=int, metavar="N", help="of kvpipe's P and of its D; default 1, with --faults 2")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="variable of every instance; may be repeated")
    add("--nixl-threads", type=int, default=4, metavar="N", help="num_threads of NixlConnector; default 4, as its own")
    add("--nixl-path", type=Path, default=Path(".cache/nixl"), help="folder of NIXL, if it is not beside vLLM")
    output = parser.add_argument_group("output")
    add = output.add_argument
    add("--work", type=Path, default=Path(".cache/bench-serving"), help="folder for model and logs")
    add("--json", type=Path, metavar="FILE", help="write the figures and all requests here too, after each round")
    add("--markdown", type=Path, metavar="FILE.md", help="write the tables here too")
    add("--plot", type=Path, metavar="FILE.svg", help="draw p99 ITL, p99 TTFT and goodput, or faults; .svg or .png")
    add("--timeline", type=Path, metavar="FILE.svg", help="draw the streams beside a long prompt; .svg or .png")


def main(args: argparse.Namespace) -> int:
    """Runs the benchmark.

    Raises:
        ConfigError: An argument is wrong, a package is missing, or there is too little memory.
        SubjectError: A server did not start, or does not answer.
    """
    try:
        from bench.serving import benchmark  # noqa: PLC0415 - needs aiohttp
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed; pip install 'kvpipe[proxy,bench]'"
        raise ConfigError(message) from error
    return benchmark.run(args)
