"""The pairs of P and D that can work together: asked in the background, for the log and `/health`."""

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Self

from kvpipe.exceptions import AuthenticationError, IncompatiblePeerError, KVPipeError
from kvpipe.proxy.config import ProxyConfig
from kvpipe.proxy.control import Control
from kvpipe.proxy.instances import Instance, url_of

# Seconds from the end of one round to the next: where all pairs can be used, and where one cannot.
_CHECK_INTERVAL_S = 60.0
_RETRY_INTERVAL_S = 5.0
# D gives up a connection to P after its own silence_s.
_CHECK_TIMEOUT_S = 30.0
# Checks at a time.
_NUM_CONCURRENT = 8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    """One answer.

    Attributes:
        reason: reason for which the pair cannot be used, or that is not known; empty if it can be used.
        is_usable: true if handoffs between the two may succeed.
    """

    reason: str
    is_usable: bool


class Pairs:
    """Has each D connect to each P, which compares their tokens and fingerprints, from entering to leaving the context.

    The ranks of a server are checked by one of them. A pair that has not answered yet counts as usable, and so does a D
    without a control address. Nothing on the way of a request waits for this.

    Args:
        config: the servers.
        control: client of control ports.
    """

    def __init__(self, config: ProxyConfig, control: Control) -> None:
        self._control = control
        self._config = config
        self._known: dict[tuple[str, str], Pair] = {}
        self._places = asyncio.Semaphore(_NUM_CONCURRENT)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="pairs")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def is_usable(self, decode: str, prefill: str) -> bool:
        """True if handoffs between two instances, by their names, may succeed."""
        pair = self._of(decode, prefill)
        return pair is None or pair.is_usable

    def failures(self) -> dict[str, dict[str, str]]:
        """Reasons for which servers cannot be used together, or are not known to be: by the URL of D, then of P."""
        found: dict[str, dict[str, str]] = {}
        for (decode, prefill), pair in self._known.items():
            if pair.reason:
                found.setdefault(decode, {})[prefill] = pair.reason
        return found

    def report(self, prefill: Mapping[str, str], decode: Mapping[str, str]) -> tuple[bool, dict[str, Any]]:
        """True if the proxy can answer requests, and the report of `/health`.

        Its status is `ok` if some P and some D can work together, and `degraded` if requests are only answered because
        some D computes their prompts too.

        Args:
            prefill: state of each P by its name: `ok`, or why it does not answer.
            decode: the same of each D.
        """
        failures = self.failures()
        states = {
            "prefill": {name: self._state(state, ((d, name) for d in decode)) for name, state in prefill.items()},
            "decode": {name: self._state(state, ((name, p) for p in prefill)) for name, state in decode.items()},
        }
        status = self._status(_healthy(prefill), _healthy(decode))
        report = {"status": status, **states}
        return status != "unavailable", report | ({"pairs": failures} if failures else {})

    def _status(self, prefill: list[str], decode: list[str]) -> str:
        if any(self.is_usable(*pair) for pair in product(decode, prefill)):
            return "ok"
        return "degraded" if decode and self._config.on_prefill_failure == "decode" else "unavailable"

    def _state(self, state: str, pairs: Iterable[tuple[str, str]]) -> str:
        """The state of an instance: one that answers and has no partner is of no use."""
        known = [self._of(*pair) for pair in pairs]
        reasons = [pair.reason for pair in known if pair is not None and not pair.is_usable]
        return f"no partner: {reasons[0]}" if state == "ok" and len(reasons) == len(known) and reasons else state

    def _of(self, decode: str, prefill: str) -> Pair | None:
        return self._known.get((url_of(decode), url_of(prefill)))

    async def _run(self) -> None:
        pairs = self._pairs()
        while pairs:
            await asyncio.gather(*(self._check(decode, prefill) for decode, prefill in pairs))
            await asyncio.sleep(_RETRY_INTERVAL_S if self.failures() else _CHECK_INTERVAL_S)

    def _pairs(self) -> list[tuple[Instance, Instance]]:
        asked = product(self._config.decode, self._config.prefill)
        return [(decode, prefill) for decode, prefill in asked if decode.control not in ("", prefill.control)]

    async def _check(self, decode: Instance, prefill: Instance) -> None:
        async with self._places:
            pair = await self._ask(decode, prefill)
        before = self._known.get((decode.url, prefill.url))
        self._known[decode.url, prefill.url] = pair
        if pair.reason and pair != before:
            logger.warning("pair.unusable decode=%s prefill=%s reason=%r", decode.url, prefill.url, pair.reason)
        elif before is not None and before.reason and not pair.reason:
            logger.info("pair.usable decode=%s prefill=%s", decode.url, prefill.url)

    async def _ask(self, decode: Instance, prefill: Instance) -> Pair:
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                reason = await self._control.check(decode.control, prefill.control, _CHECK_TIMEOUT_S)
        except (AuthenticationError, IncompatiblePeerError) as error:
            return Pair(f"control port of decode: {error}", is_usable=False)
        except (KVPipeError, OSError) as error:
            # D may be usable all the same: handoffs do not need the proxy to reach it.
            return Pair(f"control port of decode: {error or type(error).__name__}", is_usable=True)
        return Pair(reason, is_usable=not reason)


def _healthy(states: Mapping[str, str]) -> list[str]:
    return [name for name, state in states.items() if state == "ok"]
