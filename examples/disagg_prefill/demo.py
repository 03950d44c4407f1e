"""The same requests to a prefill/decode pair and to one undivided instance: the same answers?

Makes a tiny model, starts one prefill and one decode instance, the proxy and an undivided instance
of the same settings, sends each request to both, and prints what each handoff did. Two requests sample at temperature
1.2 with a seed: decode goes on from the very token that prefill drew. For one long prompt decode is asked together with
prefill, so that all blocks move while prefill computes: the trace of that is drawn as a picture.
The exit status is 1 unless all answers are identical, every handoff is full and every first token was prefill's.

    make demo
"""

import argparse
import asyncio
import contextlib
import dataclasses
import http
import json
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
from tiny_model import make_tiny_model
from tokenizers import Tokenizer

from kvpipe import transfer_params
from kvpipe.control import ControlClient
from kvpipe.exceptions import ConfigError, KVPipeError
from kvpipe.launch.deployment import Deployment, DeploymentSpec

REPOSITORY = Path(__file__).parents[2]
sys.path.append(str(REPOSITORY))

from bench import timeline, trace  # noqa: E402 - of the checkout

LOG_DIR = REPOSITORY / ".cache" / "demo-logs"
TRACE = LOG_DIR / "trace.json"
TIMELINE = REPOSITORY / ".cache" / "demo-timeline.png"
MODEL = "tiny"
BLOCK_SIZE = 32
MAX_TOKENS = 24

# float32: in bfloat16 the answers to requests that run together depend on the batches
# 512 tokens a step: a longer prompt takes several, and its first blocks move while the next step computes
VLLM_ARGS = ("--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--max-num-batched-tokens", "512")

LONG = "long, decode asked at once"
SAMPLED = {"temperature": 1.2, "top_p": 0.95, "seed": 7, "presence_penalty": 0.5}

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

# The result is there a moment after the answer: D reports it when its engine has stepped once more
RESULT_TIMEOUT_S = 5.0


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: what it shows, where it goes, its body."""

    kind: str
    path: str
    body: dict[str, Any]
    is_at_once: bool = False
    """Whether decode is asked together with prefill, so that all blocks move while prefill computes."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back: the text, the ids of its tokens, and which handoff it came over."""

    text: str
    token_ids: tuple[int, ...]
    handoff: str | None

    def same_as(self, other: "Answer") -> bool:
        """Whether text and token ids are the same; two empty answers prove nothing."""
        return bool(self.text) and (self.text, self.token_ids) == (other.text, other.token_ids)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    kind: str
    is_identical: bool
    status: dict[str, Any]

    @property
    def is_good(self) -> bool:
        """Whether the answer is right, and the prompt's KV and the first token came from the prefill instance."""
        from_prefill = (self.status.get("result"), self.status.get("first_token"))
        return self.is_identical and from_prefill == ("full", "exact")

    def cells(self) -> list[str]:
        """The columns, as text."""
        status = self.status
        return [
            self.kind,
            str(status.get("prompt_tokens", "?")),
            str(status.get("computed_tokens", "?")),
            f"{status['bytes']:,}" if "bytes" in status else "?",
            str(status.get("transport", "?")),
            f"{status['handover_ms']:.1f}" if "handover_ms" in status else "?",
            str(status.get("result", "?")),
            str(status.get("first_token", "?")),
            "yes" if self.is_identical else "NO",
        ]


HEADINGS = ["request", "prompt", "D computed", "bytes", "transport", "ms", "handoff", "first token", "identical"]
NUMBERS = {"prompt", "D computed", "bytes", "ms"}


def requests(tokenizer: Tokenizer) -> Iterator[Request]:
    """The kinds that a handoff may get wrong, each with a prompt of its own.

    Prompts of an exact length are token ids; they start at different places of the text, so that
    none is the prefix of another, but for the last pair, which shares three blocks.
    """
    ids = tokenizer.encode(_text()).ids
    block = BLOCK_SIZE

    def tokens(kind: str, num_tokens: int, *, start: int, **more: Any) -> Request:
        return _completion(kind, ids[start : start + num_tokens], **more)

    yield tokens("shorter than a block", 11, start=100)
    yield tokens("several blocks", 5 * block + 7, start=300)
    yield tokens("exactly 4 blocks", 4 * block, start=600)
    yield tokens("4 blocks and one token", 4 * block + 1, start=900)
    yield tokens("4 blocks less one token", 4 * block - 1, start=1200)
    yield dataclasses.replace(tokens(LONG, 2500, start=1500), is_at_once=True)
    yield _completion("text", "import asyncio\n\nasync def main():\n    reader, writer = ")
    yield tokens("streamed", 3 * block + 5, start=3100, stream=True)
    yield _chat("chat", "What does a prefill instance do, and what a decode instance?")
    yield _chat("chat, streamed", "Tell me about blocks, regions and sessions.", stream=True)
    # A seed and a prompt of one step: vLLM on CPUs cannot seed a prompt that it computes in several
    yield tokens("temperature 1.2", 3 * block + 9, start=2200, **SAMPLED)
    yield tokens("temperature 1.2, streamed", 2 * block + 3, start=2500, stream=True, **SAMPLED)
    shared = ids[3400 : 3400 + 3 * block]
    yield _completion("shared prefix, first", shared + ids[4000 : 4000 + block + 3])
    yield _completion("shared prefix, second", shared + ids[4200 : 4200 + block + 9])


def _text() -> str:
    return "".join(Path(module.__file__ or "").read_text() for module in (asyncio.tasks, dataclasses))


def _completion(kind: str, prompt: str | list[int], **more: Any) -> Request:
    return Request(kind, COMPLETIONS, {"prompt": prompt, **_common(), **more})


def _chat(kind: str, content: str, **more: Any) -> Request:
    messages = [{"role": "user", "content": content}]
    return Request(kind, CHAT, {"messages": messages, **_common(), **more})


def _common() -> dict[str, Any]:
    limits = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    return {"model": MODEL, "temperature": 0, "return_token_ids": True, **limits}


async def ask_divided(session: aiohttp.ClientSession, deployment: Deployment, request: Request) -> Answer:
    """Asks prefill and decode, through the proxy unless the request is for both at once."""
    if request.is_at_once:
        return await ask_at_once(session, deployment, request)
    return await ask(session, deployment.url, request)


async def ask_at_once(session: aiohttp.ClientSession, deployment: Deployment, request: Request) -> Answer:
    """Asks prefill and decode together, with what the proxy would write into their requests."""
    handoff = secrets.token_hex(16)
    prefill, decode = deployment.prefill[0], deployment.decode[0]
    parts = (
        (prefill, transfer_params.produce(handoff), {"max_tokens": 1}),
        (decode, transfer_params.consume(handoff, prefill.control), {}),
    )
    bodies = [request.body | more | {"kv_transfer_params": params} for _, params, more in parts]
    requests = [dataclasses.replace(request, body=body) for body in bodies]
    urls = [instance.url for instance, _, _ in parts]
    _, answer = await asyncio.gather(*map(ask, (session, session), urls, requests))
    return dataclasses.replace(answer, handoff=handoff)


async def ask(session: aiohttp.ClientSession, url: str, request: Request) -> Answer:
    """Sends a request and reads the whole answer, streamed or not."""
    async with session.post(url + request.path, json=request.body) as response:
        if response.status != http.HTTPStatus.OK:
            raise KVPipeError(f"{url}: HTTP {response.status}: {await response.text()}")
        raw = await response.text()
        handoff = response.headers.get("x-kvpipe-handoff")
    parts = _events(raw) if request.body.get("stream") else [json.loads(raw)]
    choices = [choice for part in parts for choice in part["choices"]]
    text = "".join(map(_choice_text, choices))
    token_ids = tuple(token for choice in choices for token in choice.get("token_ids") or ())
    return Answer(text, token_ids, handoff)


def _events(raw: str) -> list[dict[str, Any]]:
    data = [line.removeprefix("data: ") for line in raw.splitlines() if line.startswith("data: ")]
    if not data or data[-1] != "[DONE]":
        raise KVPipeError("the stream broke off: it does not end with [DONE]")
    return [json.loads(event) for event in data[:-1]]


def _choice_text(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or {}
    return choice.get("text") or message.get("content") or ""


async def handoff_status(control: ControlClient, decode: str, handoff: str | None) -> dict[str, Any]:
    """What decode's control port says about a handoff, once it has ended; the proxy knows its own handoffs only."""
    if handoff is None:
        return {"result": "no handoff"}
    deadline = time.monotonic() + RESULT_TIMEOUT_S
    while True:
        status = await control.result(decode, handoff) or {}
        if status.get("result") not in {None, "pending"} or time.monotonic() > deadline:
            return status
        await asyncio.sleep(0.1)


async def compare(deployment: Deployment, model: Path) -> list[Row]:
    """Sends every request to both, one after the other."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    undivided, decode = deployment.undivided[0].url, deployment.decode[0].control or ""
    rows = []
    timeout = aiohttp.ClientTimeout(total=300)
    async with contextlib.AsyncExitStack() as stack:
        control = stack.enter_context(contextlib.closing(ControlClient(deployment.spec.token)))
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        for request in requests(tokenizer):
            divided_answer = await ask_divided(session, deployment, request)
            undivided_answer = await ask(session, undivided, request)
            status = await handoff_status(control, decode, divided_answer.handoff)
            rows.append(Row(request.kind, divided_answer.same_as(undivided_answer), status))
            say(f"{request.kind}: {'identical' if rows[-1].is_identical else 'DIFFERENT'}")
            if not rows[-1].is_identical:
                await explain(session, deployment, request, divided_answer, undivided_answer)
    return rows


async def explain(
    session: aiohttp.ClientSession, deployment: Deployment, request: Request, divided: Answer, undivided: Answer
) -> None:
    """Asks again, to say which of two different answers its own side repeats."""
    for side, before, again in (
        ("prefill and decode", divided, await ask_divided(session, deployment, request)),
        ("the undivided instance", undivided, await ask(session, deployment.undivided[0].url, request)),
    ):
        say(f"  {side}: {list(before.token_ids)} {before.text!r}")
        say(f"  asked again: {'the same' if again.same_as(before) else f'{list(again.token_ids)} {again.text!r}'}")


def table(rows: list[Row]) -> str:
    """The rows under their headings, in columns: text to the left, numbers to the right."""
    lines = [HEADINGS, *(row.cells() for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if heading in NUMBERS else cell.ljust(width)
            for heading, cell, width in zip(HEADINGS, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )


async def demo(*, verbose: bool) -> int:
    """Runs the whole comparison and returns the exit status."""
    model = make_tiny_model()
    for log in (*LOG_DIR.glob("*.log"), TRACE):
        log.unlink(missing_ok=True)
    LOG_DIR.mkdir(parents=True, exist_ok=True)
    spec = DeploymentSpec(
        model=str(model),
        num_undivided=1,
        block_size=BLOCK_SIZE,
        token=secrets.token_hex(16),
        vllm_args=(*VLLM_ARGS, "--served-model-name", MODEL),
        env={"VLLM_NO_USAGE_STATS": "1", "KVPIPE_TRACE": str(TRACE)},
        log_dir=LOG_DIR,
    )
    say(f"starting 1 prefill, 1 decode and 1 undivided instance (minutes); logs in {LOG_DIR}")
    echo = say if verbose else None
    began = time.monotonic()
    async with Deployment(spec, echo=echo, report=say) as deployment:
        say(f"all are healthy after {time.monotonic() - began:.0f} s")
        rows = await compare(deployment, model)
    print(table(rows))
    num_good = sum(row.is_good for row in rows)
    print(f"{num_good} of {len(rows)} requests: identical answer over a full handoff, from prefill's first token on")
    if num_good < len(rows):
        print(f"the logs are kept until the next run in {LOG_DIR}")
        return 1
    show_streaming(rows)
    return 0


def show_streaming(rows: list[Row]) -> None:
    """Says how much of the long prompt was moved before prefill had its first token, and draws it."""
    handoff = next(row.status["handoff"] for row in rows if row.kind == LONG)
    life = trace.by_handoff(trace.read(TRACE))[handoff]
    sampled_s = next(event.ended_s for event in life if event.name == "sampled")
    moved = [event for event in life if event.name == "arrived"]
    early = sum(event.facts["bytes"] for event in moved if event.ended_s < sampled_s)
    total = sum(event.facts["bytes"] for event in moved)
    rest_ms = 1e3 * max(0.0, max(event.ended_s for event in moved) - sampled_s)
    print(f"{LONG}: {early:,} of {total:,} bytes came before prefill's first token, the last {rest_ms:.1f} ms after it")
    try:
        timeline.draw(TIMELINE, life, "one handoff of 2500 tokens, decode asked at once")
    except ConfigError as error:
        print(f"no picture: {error}")
    else:
        print(f"timeline: {TIMELINE}")


def say(text: str) -> None:
    """Progress goes to stderr, the table to stdout."""
    print(text if text.startswith("[") else f"demo: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(description="Compare a prefill/decode pair with one instance.")
    parser.add_argument("--verbose", action="store_true", help="show the logs of all processes")
    args = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return asyncio.run(demo(verbose=args.verbose))
    except KVPipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
