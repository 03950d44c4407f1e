"""Descriptions of the instances' engines, read in the background: from their control ports, or from vLLM by HTTP.

A request reads the latest description and never waits for one.
"""

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import orjson
from multidict import CIMultiDict

from kvpipe.exceptions import KVPipeError, ProtocolError
from kvpipe.proxy.control import Describes, FailureLog
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.tasks import OwnedTasks
from kvpipe.proxy.upstream import Answer, Upstream, failed

_REFRESH_S = 10.0
# While an address does not answer, and when instances fail one request after the other.
_MIN_INTERVAL_S = 1.0
# The proxy begins to serve after this time even if control ports do not answer.
_START_S = 1.0
# Of `kvpipe.vllm.store.stats`; there is one sample for each engine behind the URL.
_FORCING = "vllm:kvpipe_store_forces_first_tokens"
_FORCING_SAMPLE = re.compile(_FORCING + r'\{(?:.*,)?reasoning_parser="([^"\\]*)"(?:,.*)?\} ([01])(?:\.0)?')
_LONGEST_LINE = 200


class PageDescriber:
    """Reads pages of engines.

    Args:
        upstream: HTTP client of the instances.
    """

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream

    async def get(self, url: str, path: str, timeout_s: float) -> Answer:
        """Returns a page as a complete answer.

        Raises:
            InstanceError: the engine is not reached.
            TimeoutError: it does not answer in time.
        """
        async with asyncio.timeout(timeout_s):
            answer = await self._upstream.get("decode", Instance(url), path, CIMultiDict())
        answer.close()
        return answer

    async def metrics(self, url: str, timeout_s: float) -> str:
        """Returns the metrics of the engines behind a URL; raises as `get`, and `InstanceError` for another status."""
        answer = await self.get(url, "/metrics", timeout_s)
        if answer.status != HTTPStatus.OK:
            raise failed(answer)
        return answer.body.decode(errors="replace")


class StoreDescriber(PageDescriber):
    """Describes engines with KVStoreConnector by its samples among vLLM's metrics."""

    async def describe(self, address: str, timeout: float = 5.0) -> dict[str, Any]:  # noqa: ASYNC109 - of `Describes`
        """Returns the engine's support for forced first tokens, and its reasoning parser, by its URL.

        Raises:
            InstanceError: it is not reached, or answers with an error.
            ProtocolError: its metrics cannot be parsed.
        """
        return described_in(await self.metrics(address, timeout))


class ModelDescriber(PageDescriber):
    """Describes engines by vLLM's list of models."""

    async def describe(self, address: str, timeout: float = 5.0) -> dict[str, Any]:  # noqa: ASYNC109 - of `Describes`
        """Returns `max_model_len` of the engine at this URL; nothing where it is not told, as with an API key.

        Raises:
            InstanceError: it is not reached, or has failed.
        """
        answer = await self.get(address, "/v1/models", timeout)
        if answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise failed(answer)
        try:
            return {"max_model_len": min(model["max_model_len"] for model in orjson.loads(answer.body)["data"])}
        except (ValueError, LookupError, TypeError):
            return {}


def described_in(metrics: str) -> dict[str, Any]:
    """Returns the description of an engine with KVStoreConnector in its metrics. It begins with the first request.

    Raises:
        ProtocolError: they cannot be parsed.
    """
    parsers, values = set(), set()
    for line in metrics.split("\n"):
        if line.startswith(_FORCING + "{"):
            sample = _FORCING_SAMPLE.fullmatch(line)
            if sample is None:
                raise ProtocolError(f"metric {line[:_LONGEST_LINE]!r}: expected a reasoning_parser, and 0 or 1")
            parsers.add(sample[1])
            values.add(sample[2])
    return {"forces_first_tokens": values == {"1"}, "reasoning_parser": max(parsers, default="")}


# The description of a D's engine; None if none is known.
Describe = Callable[[Instance], dict[str, Any] | None]


class Descriptions:
    """The latest description of each engine, by its address; P's and D's alike.

    Args:
        source: client of control ports, a `StoreDescriber` or a `ModelDescriber`.
        addresses: addresses that it knows, of all instances; empty ones are left out.
        failures: log of addresses that do not answer.
        timeout_s: limit for one question.

    Attributes:
        when_asked: called with each address after each question, whether it was answered or failed.
    """

    when_asked: Callable[[str], None] = staticmethod(lambda _: None)

    def __init__(self, source: Describes, addresses: Iterable[str], failures: FailureLog, timeout_s: float) -> None:
        self._source = source
        self._failures = failures
        self._timeout_s = timeout_s
        self._wanted = {address: asyncio.Event() for address in addresses if address}
        self._known: dict[str, dict[str, Any]] = {}
        self._errors: dict[str, str] = {}
        self._tasks = OwnedTasks()
        # The first question, and the task that goes on asking.
        self._followed: dict[str, tuple[asyncio.Task[None], asyncio.Task[None]]] = {}

    def of(self, address: str) -> dict[str, Any] | None:
        """The latest description; None if the last question to this address failed, or none has been answered yet."""
        return self._known.get(address)

    def error(self, address: str) -> str:
        """Error of the last question to this address; empty if it was answered."""
        return self._errors.get(address, "")

    def refresh(self, address: str) -> None:
        """Have an address asked soon, because its instance has failed."""
        if address in self._wanted:
            self._wanted[address].set()

    async def start(self) -> None:
        """Ask all addresses from now on; returns when all have answered or failed, or after a second."""
        first = [self._tasks.spawn(self._ask(address)) for address in self._wanted]
        if first:
            await asyncio.wait(first, timeout=_START_S)
        for address, asked in zip(self._wanted, first, strict=True):
            self._tasks.spawn(self._keep(address, asked))

    def follow(self, address: str) -> None:
        """Ask one more address from now on."""
        if address not in self._wanted:
            self._wanted[address] = asyncio.Event()
            first = self._tasks.spawn(self._ask(address))
            self._followed[address] = first, self._tasks.spawn(self._keep(address, first))

    async def until_asked(self, addresses: Iterable[str]) -> None:
        """Return when each address that `follow` has added has answered or failed once."""
        if firsts := [self._followed[address][0] for address in addresses if address in self._followed]:
            await asyncio.wait(firsts)

    def forget(self, address: str) -> None:
        """Stop asking an address that `follow` has added."""
        if (tasks := self._followed.pop(address, None)) is not None:
            for task in tasks:
                task.cancel()
            for of_address in (self._wanted, self._known, self._errors):
                of_address.pop(address, None)

    async def close(self) -> None:
        """Stop asking."""
        await self._tasks.close(0.0)

    async def _keep(self, address: str, first: asyncio.Task[None]) -> None:
        await asyncio.wait({first})
        wanted = self._wanted[address]
        while True:
            await asyncio.sleep(_MIN_INTERVAL_S)
            if address not in self._errors:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REFRESH_S - _MIN_INTERVAL_S):
                        await wanted.wait()
            wanted.clear()
            await self._ask(address)

    async def _ask(self, address: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                self._known[address] = await self._source.describe(address, self._timeout_s)
        except (KVPipeError, OSError) as error:
            reason = str(error) or type(error).__name__
            self._known.pop(address, None)
            self._errors[address] = reason
            self._failures.note("description", address, reason, asyncio.get_running_loop().time())
        else:
            self._errors.pop(address, None)
        self.when_asked(address)
