"""CPU time of the proxy for a request: `python -m bench.bench_proxy`, beside another checkout with `--against DIR`.

P and D are stand-ins that answer at once, and control ports are in memory: the proxy's own work is what remains.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import orjson
from aiohttp import web

from bench.checkout import ROOT, python_path

PATH = "/v1/completions"
NUM_EVENTS = 100
# Name, bytes of the prompt, whether it is streamed, requests of a run.
KINDS = (
    ("answer, 2 KiB prompt", 2 << 10, False, 1000),
    ("answer, 128 KiB prompt", 128 << 10, False, 300),
    (f"stream of {NUM_EVENTS} events", 2 << 10, True, 200),
)
HEAD = {"id": "cmpl-1", "object": "text_completion", "created": 5, "model": "m"}
USAGE = {"prompt_tokens": 500, "total_tokens": 600, "completion_tokens": 100, "prompt_tokens_details": None}

PROXY = """
import asyncio, logging, os, sys
import uvloop
from kvpipe.control import Moment
from kvpipe.proxy import Instance, ProxyConfig, serve

class Control:
    async def release(self, address, handoff, timeout=5.0): return True
    async def result(self, address, handoff, timeout=5.0): return {"result": "full", "bytes": 1, "backlog_ms": 1.0}
    async def describe(self, address, timeout=5.0): return {"forces_first_tokens": True, "max_model_len": 1 << 20}
    async def subscribe(self, address, handoff, lead_s, timeout=5.0): return Moment("finished")
    async def watched(self, address, handoff, timeout=5.0): return Moment("watched")

def show(record):
    if record.msg.startswith("proxy.listening"):
        print(record.getMessage(), flush=True)
    return True

logging.basicConfig(level="INFO", stream=open(os.devnull, "w"), format="%(levelname)s %(name)s %(message)s")
logging.getLogger().handlers[0].addFilter(show)
prefill, decode = (Instance(url, "in.memory:1") for url in sys.argv[1:])
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(serve(ProxyConfig(prefill=(prefill,), decode=(decode,), port=0), Control()))
"""


async def prefill(request: web.Request) -> web.Response:
    """P: one token, with the parameters of a handoff."""
    handoff = orjson.loads(await request.read())["kv_transfer_params"]["kvpipe"]["handoff"]
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}
    params = {"kvpipe": {"handoff": handoff, "first_token": 7}}
    answer = HEAD | {"choices": [choice], "usage": USAGE, "kv_transfer_params": params}
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


async def decode(request: web.Request) -> web.StreamResponse:
    """D: an answer of 2 KiB, or a stream whose events arrive one by one."""
    body = orjson.loads(await request.read())
    if not body.get("stream"):
        answer = HEAD | {"choices": [{"index": 0, "text": "a" * 2048, "finish_reason": "length"}], "usage": USAGE}
        return web.Response(body=orjson.dumps(answer), content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    choice = {"index": 0, "text": "a", "logprobs": None, "finish_reason": None}
    event = b"data: " + orjson.dumps(HEAD | {"choices": [choice]}) + b"\n\n"
    for _ in range(NUM_EVENTS):
        await response.write(event)
        await asyncio.sleep(0.001)
    await response.write(b"data: [DONE]\n\n")
    return response


async def serve_instances() -> None:
    """Prints the URLs of P and D, and serves until it is ended."""
    for handler in (prefill, decode):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post(PATH, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def cpu_s(pid: int) -> float:
    """CPU time of a process's living threads, in seconds."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def measure(proxy: tuple[int, str], num_bytes: int, num_requests: int, *, is_streamed: bool) -> float:
    """CPU time of the proxy for a request, in microseconds; 16 requests run side by side."""
    pid, url = proxy
    body = orjson.dumps({"model": "m", "prompt": "x" * num_bytes, "max_tokens": 100, "stream": is_streamed})
    left = iter(range(num_requests))
    async with aiohttp.ClientSession() as client:

        async def ask() -> None:
            for _ in left:
                async with client.post(url + PATH, data=body) as response:
                    await response.read()
                    response.raise_for_status()

        begun_s = cpu_s(pid)
        await asyncio.gather(*(ask() for _ in range(16)))
        await asyncio.sleep(0.2)  # results are asked for after the answers
        return (cpu_s(pid) - begun_s) / num_requests * 1e6


def start(processes: ExitStack, source: Path, arguments: list[str]) -> subprocess.Popen[str]:
    """Starts Python with the kvpipe of a checkout; it is ended with `processes`."""
    environment = os.environ | {"PYTHONPATH": python_path(str(source / "python"))}
    command = [sys.executable, *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)  # noqa: S603 - our own
    processes.callback(process.wait)
    processes.callback(process.kill)
    return process


def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """The first lines that a process prints."""
    if process.stdout is None:
        return []
    return [process.stdout.readline().strip() for _ in range(count)]


def main() -> None:
    """Prints the medians of all rounds, in which the checkouts take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="root of another checkout, with its extension built")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    sources = [ROOT, *([options.against.resolve()] if options.against else [])]
    found: dict[tuple[str, Path], list[float]] = {}
    with ExitStack() as processes:
        urls = lines(start(processes, sources[0], ["-m", "bench.bench_proxy", "instances"]), 2)
        proxies = {}
        for source in sources:
            proxy = start(processes, source, ["-c", PROXY, *urls])
            port = lines(proxy, 1)[0].split("port=")[1].split()[0]
            proxies[source] = proxy.pid, f"http://127.0.0.1:{port}"
        for number in range(options.rounds + 1):
            for name, num_bytes, is_streamed, num_requests in KINDS:
                for source, proxy in sorted(proxies.items(), reverse=bool(number % 2)):
                    used_us = asyncio.run(measure(proxy, num_bytes, num_requests, is_streamed=is_streamed))
                    if number:  # the first round warms up
                        found.setdefault((name, source), []).append(used_us)
    for (name, source), used in found.items():
        print(f"{name}, {source}: median {statistics.median(used):.0f} us ({min(used):.0f} to {max(used):.0f})")


if __name__ == "__main__":
    if sys.argv[1:] == ["instances"]:
        asyncio.run(serve_instances())
    else:
        main()
