"""The load generator: sends each request at its time, however slow the answers are, and notes when tokens arrive."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from bench.instances.vllm import MODEL, NIXL_PRODUCE
from bench.serving.workload import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from bench.serving.workload import Workload

_ERROR_CHARACTERS = 300
_DATA = b"data: "


@dataclass(frozen=True)
class Outcome:
    """What became of one request. Times are seconds from the beginning of the workload.

    Attributes:
        request: The request.
        sent_s: When it was sent.
        chunks_s: When each chunk with text arrived.
        end_s: When the answer had ended, or failed.
        num_output: Tokens by the answer's usage; 0 if it did not come.
        error: Why it failed; empty if it has not.
    """

    request: Request
    sent_s: float
    chunks_s: tuple[float, ...]
    end_s: float
    num_output: int
    error: str

    @property
    def ttft_s(self) -> float | None:
        """From when the request was due to its first token; `None` without one."""
        return self.chunks_s[0] - self.request.at_s if self.chunks_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Times between chunks; the first one is that from the first to the second token."""
        return [later - earlier for earlier, later in pairwise(self.chunks_s)]

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first one; `None` if there is none."""
        if len(self.chunks_s) < 2 or self.num_output < 2:  # noqa: PLR2004 - a mean of gaps
            return None
        return (self.chunks_s[-1] - self.chunks_s[0]) / (self.num_output - 1)


class Target(Protocol):
    """What requests are sent to."""

    async def post(self, http: aiohttp.ClientSession, number: int, body: dict[str, Any]) -> aiohttp.ClientResponse:
        """Sends a request for a stream and returns its response, whose body has not been read."""


@dataclass(frozen=True)
class RoundRobin:
    """Instances or proxies that get requests in turn."""

    urls: Sequence[str]

    async def post(self, http: aiohttp.ClientSession, number: int, body: dict[str, Any]) -> aiohttp.ClientResponse:
        """Sends a request."""
        return await http.post(f"{self.urls[number % len(self.urls)]}/v1/completions", json=body)


def body_of(prompt: Sequence[int], num_output: int, **more: Any) -> dict[str, Any]:
    """A streamed completion of exactly `num_output` tokens, each of which has a text.

    It has no `min_tokens`: with it, decode would not continue after prefill's token.
    """
    return {
        "model": MODEL,
        "prompt": list(prompt),
        "temperature": 0,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "max_tokens": num_output,
        "stream": True,
        "stream_options": {"include_usage": True},
        **more,
    }


@dataclass
class _Stream:
    """What a request's stream has brought so far."""

    zero_s: float
    seen: Callable[[int], None] | None = None
    chunks_s: list[float] = field(default_factory=list)
    num_output: int = 0
    error: str = ""
    is_complete: bool = False

    def read(self, line: bytes) -> None:
        """Reads a line that has just come."""
        if not line.startswith(_DATA):
            return
        data = line[len(_DATA) :].strip()
        if data == b"[DONE]":
            self.is_complete = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"])
        if any(choice["text"] for choice in event.get("choices") or ()):
            self.chunks_s.append(time.monotonic() - self.zero_s)
            if self.seen is not None:
                self.seen(len(self.chunks_s))
        if event.get("usage"):
            self.num_output = event["usage"]["completion_tokens"]

    def failure(self, num_wanted: int) -> str:
        """Why a stream that has ended is no complete answer; empty if it is."""
        if self.error or not self.is_complete:
            return self.error or "the stream ended early"
        return "" if self.num_output == num_wanted else f"{self.num_output} tokens instead of {num_wanted}"


async def _sent(
    target: Target, http: aiohttp.ClientSession, request: Request, body: dict[str, Any], stream: _Stream
) -> Outcome:
    """Sends a request and reads its stream to the end."""
    sent_s = time.monotonic() - stream.zero_s
    error = ""
    try:
        async with await target.post(http, request.number, body) as response:
            if response.status == 200:  # noqa: PLR2004 - OK
                async for line in response.content:
                    stream.read(line)
                error = stream.failure(request.num_output)
            else:
                error = f"{response.status}: {await response.text()}"
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as raised:
        error = stream.error or f"{type(raised).__name__}: {raised}"
    end_s = time.monotonic() - stream.zero_s
    chunks_s = tuple(stream.chunks_s)
    return Outcome(request, sent_s, chunks_s, end_s, stream.num_output, error[:_ERROR_CHARACTERS])


async def offer(
    target: Target, workload: Workload, use: str, limit_s: float, ended: Callable[[Outcome], None]
) -> list[Outcome]:
    """Offers a workload: sends each request when it is due, whatever has become of those before (open loop).

    Args:
        target: Where requests are sent to.
        workload: The requests.
        use: Names this use of the workload; its prompts are like no others.
        limit_s: Seconds after which a request is given up.
        ended: Is called with each request that has ended.
    """
    bodies = [body_of(workload.prompt(request, use), request.num_output) for request in workload.requests]
    async with _session(limit_s) as http:
        zero_s = time.monotonic()

        async def one(request: Request) -> Outcome:
            await asyncio.sleep(request.at_s - (time.monotonic() - zero_s))
            outcome = await _sent(target, http, request, bodies[request.number], _Stream(zero_s))
            ended(outcome)
            return outcome

        return list(await asyncio.gather(*map(one, workload.requests)))


async def ask(
    target: Target,
    prompt: Sequence[int],
    num_output: int,
    limit_s: float,
    number: int = 0,
    *,
    seen: Callable[[int], None] | None = None,
) -> Outcome:
    """Sends one request; its times are from then. Calls `seen` with the number of chunks that have arrived."""
    async with _session(limit_s) as http:
        request = Request(number, 0.0, len(prompt), num_output)
        return await _sent(target, http, request, body_of(prompt, num_output), _Stream(time.monotonic(), seen))


def _session(limit_s: float) -> aiohttp.ClientSession:
    # No limit of connections: a request that waits in the generator would not be open loop.
    connector = aiohttp.TCPConnector(limit=0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=limit_s))


@dataclass(frozen=True)
class NixlPull:
    """Asks prefill, then decode with prefill's parameters, as vLLM's toy proxies do, but without a proxy between."""

    prefill_url: str
    decode_url: str

    async def post(self, http: aiohttp.ClientSession, number: int, body: dict[str, Any]) -> aiohttp.ClientResponse:  # noqa: ARG002 - as Target's
        """Sends a request to both, one after the other."""
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": NIXL_PRODUCE}
        del first["stream_options"]
        async with http.post(f"{self.prefill_url}/v1/completions", json=first) as response:
            if response.status != 200:  # noqa: PLR2004 - OK
                message = f"prefill answered {response.status}: {(await response.text())[:_ERROR_CHARACTERS]}"
                raise aiohttp.ClientPayloadError(message)
            held = (await response.json())["kv_transfer_params"]
        return await http.post(f"{self.decode_url}/v1/completions", json={**body, "kv_transfer_params": held})
