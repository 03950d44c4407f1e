"""Test handoffs: one short request for each pair, sent to the producer and then to the consumer as a router would."""

from __future__ import annotations

import asyncio
import json
import os
import random
import secrets
import ssl
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Self

import aiohttp

from kvpipe import transfer_params
from kvpipe.doctor.facts import Failure, FailureKind, HttpFacts
from kvpipe.exceptions import ConfigError, KVPipeError, TransferTimeoutError
from kvpipe.proxy import tls
from kvpipe.proxy.api_keys import instances_authorization

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from types import TracebackType

    from kvpipe.control import ControlClient
    from kvpipe.doctor.facts import InstanceFacts, PairFacts

# For one request of a test handoff: an engine compiles some of its code for the first one.
_REQUEST_TIMEOUT_S = 60.0
# For all test handoffs together.
_HANDOFFS_TIMEOUT_S = 300.0
# Of an answer that is longer, this much is read.
_LONGEST_ANSWER = 1 << 20
# Test handoffs at a time.
_NUM_CONCURRENT = 4
_LONGEST_ERROR = 300
# The producer keeps the last token, so two blocks and a token are two blocks of KV at least.
_NUM_BLOCKS = 2


class Api:
    """A client of the instances' API, between entering and leaving the context.

    Args:
        timeout_s: Seconds for a query that costs an engine nothing.
        announce: Called with a line before each test handoff.
        instances_ca_file: As of `kvpipe proxy`.
        instances_api_key_file: As of `kvpipe proxy`; without it the key is `VLLM_API_KEY`.

    Raises:
        ConfigError: A file cannot be read or used.
    """

    def __init__(
        self,
        timeout_s: float,
        announce: Callable[[str], None],
        instances_ca_file: Path | None = None,
        instances_api_key_file: Path | None = None,
    ) -> None:
        self._timeout_s, self._announce = timeout_s, announce
        self._places = asyncio.Semaphore(_NUM_CONCURRENT)
        self._late: set[str] = set()
        key = os.environ.get("VLLM_API_KEY")
        authorization = f"Bearer {key}" if key else None
        if instances_api_key_file is not None:
            authorization = instances_authorization(instances_api_key_file).current()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls.instances_context(instances_ca_file)),
            headers={"Authorization": authorization} if authorization else {},
            timeout=aiohttp.ClientTimeout(total=_REQUEST_TIMEOUT_S),
        )

    async def __aenter__(self) -> Self:
        await self._session.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.__aexit__(kind, error, trace)

    async def query(self, url: str) -> HttpFacts:
        """Queries the model of an instance. The answer has the time of its clock, too."""
        facts, sent = HttpFacts(), time.time()
        try:
            async with asyncio.timeout(self._timeout_s), self._session.get(f"{url}/v1/models") as response:
                _note_clock(facts, sent, time.time(), response.headers.get("Date", ""))
                facts.model = str((await _json(response))["data"][0]["id"])
        except aiohttp.ClientSSLError as error:
            reason = tls.failure(error.__cause__) if isinstance(error.__cause__, ssl.SSLError) else str(error)
            facts.failure = Failure(FailureKind.ERROR, f"{url}: {reason}")
        except aiohttp.ClientConnectorError as error:
            facts.failure = Failure.without_connection(url, error.os_error)
        except TimeoutError:
            facts.failure = Failure(FailureKind.SILENT, f"{url}/v1/models: no answer within {self._timeout_s:g} s")
        except (aiohttp.ClientError, ValueError, LookupError, TypeError, OSError) as error:
            facts.failure = Failure(FailureKind.ERROR, f"{url}/v1/models: {error or type(error).__name__}")
        return facts

    async def hand_over(self, pairs: Iterable[PairFacts], control: ControlClient) -> None:
        """Makes one test handoff for each pair whose instances have URLs, and APIs that answer."""
        deadline = asyncio.get_running_loop().time() + _HANDOFFS_TIMEOUT_S
        sides = ((pair, (pair.producer, pair.consumer)) for pair in pairs)
        complete = [pair for pair, both in sides if all(side.http and side.http.model for side in both)]
        await asyncio.gather(*(self._test(pair, control, deadline) for pair in complete))

    async def _test(self, pair: PairFacts, control: ControlClient, deadline: float) -> None:
        """Has the producer compute a short prompt of random digits, and the consumer continue with its KV."""
        sides, handoff = (pair.producer, pair.consumer), ""
        try:
            async with asyncio.timeout_at(deadline), self._places:
                if late := self._late.intersection(side.name for side in sides):
                    pair.skipped = f"skipped: {min(late)} did not answer another test handoff in time"
                    return
                handoff, num_tokens = secrets.token_hex(16), _num_tokens(sides)
                self._announce(f"test handoff {pair.name}: a prompt of about {num_tokens} tokens")
                try:
                    pair.handoff = await self._result(pair, control, handoff, num_tokens)
                except (aiohttp.ClientError, KVPipeError, ValueError, OSError) as error:
                    pair.failure = str(error) or f"{type(error).__name__} after {_REQUEST_TIMEOUT_S:g} s"
        except TimeoutError:
            pair.skipped = f"skipped: all test handoffs have {_HANDOFFS_TIMEOUT_S:g} s together"
        if handoff and (pair.handoff is None or pair.handoff["result"] != "full"):
            # the producer's lease would end by itself, later
            with suppress(KVPipeError, OSError):
                await control.release(pair.producer.name, handoff, self._timeout_s)

    async def _result(
        self, pair: PairFacts, control: ControlClient, handoff: str, num_tokens: int
    ) -> dict[str, Any] | None:
        prompt = " ".join(random.choices("0123456789", k=num_tokens))  # noqa: S311 - only new to the prefix caches
        produced = await self._complete(pair.producer, prompt, transfer_params.produce(handoff))
        params = produced.get("kv_transfer_params")
        if not params:
            message = f"the answer of {pair.producer.target.url} has no kv_transfer_params; its log has the reason"
            raise ConfigError(message)
        await self._complete(pair.consumer, prompt, params)
        result = await control.result(pair.consumer.name, handoff, self._timeout_s)
        if result is None:
            message = f"{pair.consumer.name} knows no result: is it the control port of {pair.consumer.target.url}?"
            raise ConfigError(message)
        return result

    async def _complete(self, instance: InstanceFacts, prompt: str, params: dict[str, Any]) -> dict[str, Any]:
        model = instance.http.model if instance.http else ""
        rank = instance.description.get("data_parallel_rank")
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        body = {"model": model, "prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
        url = f"{instance.target.url}/v1/completions"
        try:
            async with self._session.post(url, json=body, headers=headers) as response:
                answer = await _json(response)
        except TimeoutError as error:
            self._late.add(instance.name)
            message = f"{url} did not answer within {_REQUEST_TIMEOUT_S:g} s"
            raise TransferTimeoutError(message) from error
        return answer if isinstance(answer, dict) else {}


async def _json(response: aiohttp.ClientResponse) -> Any:
    if response.status == HTTPStatus.UNAUTHORIZED:
        message = "401: it wants another API key; set VLLM_API_KEY, or name it by --instances-api-key-file"
        raise ConfigError(message)
    text = await _text(response)
    if response.status != HTTPStatus.OK:
        message = f"{response.url} answers {response.status}: {text[:_LONGEST_ERROR]}"
        raise ConfigError(message)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        message = f"{response.url} answers no JSON of up to {_LONGEST_ANSWER} bytes; is it an instance of vLLM?"
        raise ConfigError(message) from error


async def _text(response: aiohttp.ClientResponse) -> str:
    try:
        body = await response.content.readexactly(_LONGEST_ANSWER)
    except asyncio.IncompleteReadError as ended:
        body = ended.partial
    return body.decode(errors="replace")


def _note_clock(facts: HttpFacts, sent: float, answered: float, date: str) -> None:
    """Notes what a header `Date` says. Its clock then showed that second, at some time between query and answer."""
    try:
        second = parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        return
    earliest, latest = second - answered, second + 1 - sent
    facts.clock_offset_s = (earliest + latest) / 2
    facts.clock_uncertainty_s = (latest - earliest) / 2


def _num_tokens(sides: tuple[InstanceFacts, ...]) -> int:
    """Digits that make two blocks in any tokenizer, if both engines take as many tokens: two for each digit at most."""
    block_size = max(_block_size(side) for side in sides)
    longest = min(int(side.description.get("max_model_len") or 0) for side in sides)
    return max(2, min(_NUM_BLOCKS * block_size + 1, (longest - 1) // 2))


def _block_size(side: InstanceFacts) -> int:
    text = side.fingerprint.get("block size", "")
    return int(text) if text.isdecimal() else 1
