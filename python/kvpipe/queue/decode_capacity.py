"""True if D has capacity for another request: what it reports of itself, and whether it is healthy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from multidict import CIMultiDict

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.descriptions import described_in
from kvpipe.proxy.ranks import engines_in, rank_behind_url, rank_of
from kvpipe.proxy.upstream import InstanceError, failed
from kvpipe.queue.broker import called
from kvpipe.queue.nodes import REPORT_EVERY_S

if TYPE_CHECKING:
    from kvpipe.proxy.control import Control
    from kvpipe.proxy.health import Health
    from kvpipe.proxy.instances import Instance
    from kvpipe.proxy.upstream import Upstream

# Seconds between two questions to D while it has requests, and while it is not healthy.
_LOOK_EVERY_S = 1.0
_TIMEOUT_S = 5.0
# A busy machine may fail to connect once.
_UNREACHABLE_AFTER = 2
_FROZEN = "is frozen"
# Requests that wait for a place. Those that wait for KV, "deferred", need no other D. Older vLLMs count both as one.
_WAITING_FOR_PLACE = re.compile(
    r'^vllm:num_requests_waiting_by_reason(\{(?:.*,)?reason="capacity"(?:,.*)?\}) (\S+)$', re.MULTILINE
)
_WAITING = re.compile(r"^vllm:num_requests_waiting(\{.*\})? (\S+)$", re.MULTILINE)

logger = logging.getLogger(__name__)


class DecodeCapacity:
    """Watches one D.

    Args:
        decode: D.
        upstream: HTTP client of D.
        control: client of control ports.
        health: D's health; while it is frozen D is not asked.

    Attributes:
        reason: reason for taking no request; empty if it takes some.
        description: its engine, by itself; empty while it is not known.
        rank: rank of this engine behind D's URL; None if there is no other.
    """

    def __init__(self, decode: Instance, upstream: Upstream, control: Control, health: Health) -> None:
        self._decode = decode
        self._upstream = upstream
        self._control = control
        self._health = health
        self._wanted = asyncio.Event()
        self._has_looked = False
        self._num_unreached = 0
        self.reason = "not asked yet"
        self.description: dict[str, Any] = {}
        self.rank: int | None = None

    def failed(self, reason: str) -> None:
        """Note that D has failed a request: it takes none until it is seen to be healthy."""
        self.reason = reason
        self._wanted.set()

    @property
    def is_unreachable(self) -> bool:
        """True if nothing listens at D any more. vLLM that was shut down may keep the connections of answers open."""
        return self._num_unreached >= _UNREACHABLE_AFTER

    def got_request(self) -> None:
        """Have D looked at soon."""
        self._wanted.set()

    async def until_looked(self, *, is_busy: bool) -> None:
        """Looks at D when it is time.

        Often while it has requests or takes none, else once it has got one, or after `REPORT_EVERY_S`.
        """
        if not self._has_looked:
            self._has_looked = True
        elif is_busy or self.reason:
            await asyncio.sleep(_LOOK_EVERY_S)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REPORT_EVERY_S):
                    await self._wanted.wait()
        self._wanted.clear()
        before, self.reason = self.reason, await self._look()
        if before != self.reason:
            logger.info("decode.capacity url=%s: %s", self._decode.url, self.reason or "takes requests")

    async def _look(self) -> str:
        if self._health.is_frozen:
            return _FROZEN
        try:
            num_waiting = await called(self._ask(), _TIMEOUT_S)
        except (InstanceError, KVPipeError, OSError, TimeoutError, ValueError) as error:
            self.description = {}
            is_unreached = isinstance(error, InstanceError) and error.failure == "unreached"
            self._num_unreached = self._num_unreached + 1 if is_unreached else 0
            return getattr(error, "reason", "") or str(error) or "no answer in time"
        self._num_unreached = 0
        return f"{num_waiting:.0f} requests wait in it" if num_waiting else ""

    async def _ask(self) -> float:
        """Number of requests that wait in D, once it is healthy and described."""
        answer = await self._upstream.get("decode", self._decode, "/health", CIMultiDict())
        if answer.status != HTTPStatus.OK:
            raise failed(answer)
        answer = await self._upstream.get("decode", self._decode, "/metrics", CIMultiDict())
        is_read = answer.status == HTTPStatus.OK
        metrics = answer.body.decode(errors="replace") if is_read else ""
        self.description = await self._describe(metrics)
        engine, engines = rank_of(self.description), engines_in(metrics)
        rank = rank_behind_url(engine, engines)
        if engine is not None and not is_read:
            raise failed(answer)
        if engine is not None and rank is None:
            remedy = "name a control port of this URL" if engines else "start it without --disable-log-stats"
            reason = f"{self._decode.control} is the control port of engine {engine}, and its metrics list"
            reason += f" {engines or 'none'}; {remedy}"
            raise InstanceError("decode", self._decode, reason, "unavailable")
        self.rank = rank
        return _num_waiting(metrics, engine)

    async def _describe(self, metrics: str) -> dict[str, Any]:
        if not self._decode.control:
            return described_in(metrics)
        return self.description or await self._control.describe(self._decode.control, _TIMEOUT_S)


def _num_waiting(metrics: str, engine: int | None) -> float:
    """Number of requests that wait for a place in an engine, or in all engines behind the URL."""
    samples = _WAITING_FOR_PLACE.findall(metrics) or _WAITING.findall(metrics)
    return sum(float(value) for labels, value in samples if engine is None or f'engine="{engine}"' in labels)
