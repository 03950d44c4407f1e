"""Two prefill and two decode instances behind RabbitMQ: the answers of one instance, also when a worker is killed?

Makes a tiny model, starts a broker, a store, two prefill and two decode instances with a worker beside each of the
latter, the front end and an undivided instance. Sends sampled requests to the front end and to the undivided instance,
then has a worker killed in the middle of others. The exit status is 1 unless all answers are identical.

    python examples/rabbitmq_xpyd/demo.py                                    # with a broker and a store of its own
    python examples/rabbitmq_xpyd/demo.py --store redis://127.0.0.1:6379     # with a Redis or Valkey that runs already
    python examples/rabbitmq_xpyd/demo.py --stay                             # goes on until Ctrl+C
"""

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from tokenizers import Tokenizer

REPOSITORY = Path(__file__).parents[2]
sys.path += [str(REPOSITORY), str(REPOSITORY / "examples" / "disagg_prefill")]

from tiny_model import make_tiny_model  # noqa: E402 - it is beside another demo

from bench.instances.broker_process import BrokerProcess  # noqa: E402 - of the checkout
from kvpipe.exceptions import KVPipeError  # noqa: E402 - as above
from kvpipe.launch.deployment import Deployment, DeploymentSpec, Instance  # noqa: E402 - as above
from kvpipe.launch.ports import free_ports  # noqa: E402 - as above
from kvpipe.launch.process import ChildProcess  # noqa: E402 - as above
from kvpipe.launch.spec import OWN_STORE  # noqa: E402 - as above
from kvpipe.launch.watchdog import Watchdog  # noqa: E402 - as above

LOG_DIR = REPOSITORY / ".cache" / "rabbitmq-demo-logs"
MODEL, QUEUE = "tiny", "kvpipe-demo"
BLOCK_SIZE, CHUNK_SIZE = 32, 64
NUM_REQUESTS, MAX_TOKENS, NUM_BEFORE = 8, 200, 10
# float32: in bfloat16 the last tokens of a prompt round differently when they are computed alone. Whole prompts in one
# step: vLLM on CPU dies of a seeded request that is computed in several ones.
VLLM_ARGS = ("--dtype", "float32", "--max-model-len", "4096", "--max-num-batched-tokens", "4096", "--enforce-eager")
READY_WITHIN_S, GRACE_S = 60.0, 15.0

Answer = tuple[str, list[int]]


async def main() -> int:
    """Runs the demo and returns its exit status."""
    parser = argparse.ArgumentParser(description="Compare two pairs behind a broker with one instance.")
    parser.add_argument("--amqp", default="", metavar="URL", help="a RabbitMQ that runs already")
    parser.add_argument("--store", default=OWN_STORE, metavar="URL", help="a store that runs already")
    parser.add_argument("--stay", action="store_true", help="go on until Ctrl+C")
    args = parser.parse_args()
    model, token = make_tiny_model(), os.environ.get("KVPIPE_TOKEN") or secrets.token_hex(16)
    LOG_DIR.mkdir(parents=True, exist_ok=True)
    spec = DeploymentSpec(
        model=str(model),
        num_prefill=2,
        num_decode=2,
        num_undivided=1,
        block_size=BLOCK_SIZE,
        store=args.store,
        # A tiny model computes faster than any store answers: without this, it would compute.
        connector_config={"chunk_size": CHUNK_SIZE, "always_load": True},
        token=token,
        vllm_args=(*VLLM_ARGS, "--served-model-name", MODEL),
        env={"VLLM_NO_USAGE_STATS": "1"},
        proxy_command=None,
        log_dir=LOG_DIR,
    )
    say(f"starting the broker, the store and 5 vLLM instances (minutes); logs in {LOG_DIR}")
    async with contextlib.AsyncExitStack() as stack:
        watchdog = Watchdog()
        stack.push_async_callback(watchdog.close)
        env = {"KVPIPE_AMQP": args.amqp or stack.enter_context(own_broker(watchdog)), "KVPIPE_TOKEN": token}
        deployment = await stack.enter_async_context(Deployment(spec, report=say))
        url, workers = await stack.enter_async_context(connected(deployment, env, watchdog))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await until_taken(session, url, len(workers))
        say(f"queues and workers: {url}/queue")
        is_good = await compare(session, deployment, url, workers[0])
        print("all answers are identical" if is_good else "NOT as it should be")
        if args.stay:
            say(f"send requests to {url}/v1/completions, look at {url}/queue; Ctrl+C ends all")
            await asyncio.Event().wait()
    return 0 if is_good else 1


async def compare(session: aiohttp.ClientSession, deployment: Deployment, url: str, worker: ChildProcess) -> bool:
    """Prints a row for each round; returns whether all answers are identical."""
    instances = [*deployment.prefill, *deployment.decode]
    print("  ".join(["round".ljust(15), *(each.name for each in instances), "identical"]))
    are_identical = True
    for number, (name, event) in enumerate({"all live": None, "a worker killed": lambda: killed(worker)}.items()):
        bodies = requests(Path(deployment.spec.model), number)
        expected = await at_once(session, deployment.undivided[0].url, bodies, None)
        before = [await num_answered(session, each) for each in instances]
        is_identical = await at_once(session, url, bodies, event) == expected
        counts = [await num_answered(session, each) - was for each, was in zip(instances, before, strict=True)]
        cells = [str(count).rjust(len(each.name)) for count, each in zip(counts, instances, strict=True)]
        print("  ".join([name.ljust(15), *cells, ("yes" if is_identical else "NO").rjust(len("identical"))]))
        are_identical = are_identical and is_identical
    return are_identical


@contextlib.contextmanager
def own_broker(watchdog: Watchdog) -> Iterator[str]:
    """Runs a broker; yields its URL."""
    # Where `make setup` has put the broker, if the machine has none.
    os.environ["PATH"] += f"{os.pathsep}{REPOSITORY / '.cache' / 'servers' / 'bin'}"
    with tempfile.TemporaryDirectory() as folder, BrokerProcess(Path(folder)) as broker:
        watchdog.watch(broker.pid)
        yield broker.url


@contextlib.asynccontextmanager
async def connected(
    deployment: Deployment, env: dict[str, str], watchdog: Watchdog
) -> AsyncIterator[tuple[str, list[ChildProcess]]]:
    """Runs the front end before the prefill instances, and the workers; yields its address, and them."""
    port = str(free_ports(1)[0])
    prefill = [part for each in deployment.prefill for part in ("--prefill", each.url)]
    arguments = {"front": ["proxy", "--dispatch", "amqp", "--port", port, *prefill]}
    arguments |= {f"worker-{i}": ["worker", "--decode", each.url] for i, each in enumerate(deployment.decode)}
    front, *workers = (
        ChildProcess(
            name,
            [sys.executable, "-m", "kvpipe", *words, "--queue", QUEUE],
            {**os.environ, **env},
            watchdog=watchdog,
            log_path=LOG_DIR / f"{name}.log",
        )
        for name, words in arguments.items()
    )
    async with contextlib.AsyncExitStack() as stack:
        for child in (front, *workers):
            stack.push_async_callback(child.stop, GRACE_S)
            await child.start()
        yield f"http://127.0.0.1:{port}", workers


async def until_taken(session: aiohttp.ClientSession, url: str, num_workers: int) -> None:
    """Waits until all workers take requests."""
    async with asyncio.timeout(READY_WITHIN_S):
        while await num_taking(session, url) < num_workers:  # noqa: ASYNC110 - the front end tells nobody
            await asyncio.sleep(0.2)


async def num_taking(session: aiohttp.ClientSession, url: str) -> int:
    """Workers that take requests, as the front end knows them; none while it does not answer."""
    try:
        async with session.get(f"{url}/queue") as response:
            workers = (await response.json())["workers"] if response.ok else []
            return sum(not worker["reason"] for worker in workers)
    except aiohttp.ClientConnectionError:
        return 0


async def killed(worker: ChildProcess) -> None:
    """Kills a worker, and starts it again."""
    say(f"killing {worker.name}")
    worker.send_signal(signal.SIGKILL)
    await worker.wait()
    await worker.stop(0)
    await worker.start()


def requests(model: Path, number: int) -> list[dict[str, Any]]:
    """Bodies of sampled requests; no prompt is the prefix of another."""
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(Path(asyncio.tasks.__file__).read_text()).ids
    starts = range(number * 4000, number * 4000 + 500 * NUM_REQUESTS, 500)
    return [
        {
            "model": MODEL,
            "prompt": ids[start : start + 40 * (1 + index)],
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            "seed": index,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        for index, start in enumerate(starts)
    ]


async def at_once(
    session: aiohttp.ClientSession,
    url: str,
    bodies: list[dict[str, Any]],
    event: Callable[[], Awaitable[None]] | None,
) -> list[Answer]:
    """Sends requests at once; has something happen when every client has a part of its answer."""
    begun = [asyncio.Event() for _ in bodies]
    answering = [asyncio.create_task(ask(session, url, *each)) for each in zip(bodies, begun, strict=True)]
    if event is not None:
        await asyncio.gather(*(each.wait() for each in begun))
        await event()
    return await asyncio.gather(*answering)


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], begun: asyncio.Event) -> Answer:
    """Sends a request; returns text and token ids. Sets the event when some of them have come, or it has failed."""
    text, tokens = "", list[int]()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:  # noqa: PLR2004 - HTTP's
                message = f"{url}: HTTP {response.status}: {await response.text()}"
                raise KVPipeError(message)
            async for line in response.content:
                if line.startswith(b"data: {"):
                    chunk = json.loads(line.removeprefix(b"data: "))
                    if "error" in chunk:
                        message = f"{url}: {chunk['error']}"
                        raise KVPipeError(message)
                    text += chunk["choices"][0]["text"]
                    tokens += chunk["choices"][0]["token_ids"]
                if len(tokens) >= NUM_BEFORE:
                    begun.set()
    finally:
        begun.set()
    return text, tokens


async def num_answered(session: aiohttp.ClientSession, instance: Instance) -> int:
    """Requests that an instance has answered to the end; a prefill instance's answers have one token."""
    async with session.get(f"{instance.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    found = [line for line in lines if line.startswith("vllm:request_success_total{") and 'reason="length"' in line]
    return int(sum(float(line.split()[-1]) for line in found))


def say(text: str) -> None:
    """Progress goes to stderr, the table to stdout."""
    print(f"rabbitmq demo: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        with contextlib.suppress(KeyboardInterrupt):
            sys.exit(asyncio.run(main()))
    except KVPipeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
