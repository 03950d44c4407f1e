"""Results of handoffs: where to ask for them, and what the proxy counts and learns from them."""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.control import Control, FailureLog
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.just_in_time import Leads, Timing
from kvpipe.proxy.metrics import Metrics

# About 4 MB; the proxy asks every instance about older handoffs.
_MAX_REMEMBERED = 10_000
# An abort reaches D's scheduler between two steps; on CPUs one takes up to 1.3 s.
_ABORTED_AFTER_S = 2.0


class RecentHandoffs:
    """Control addresses and timing of the latest handoffs, by id."""

    def __init__(self, all_addresses: tuple[str, ...], capacity: int = _MAX_REMEMBERED) -> None:
        self._all_addresses = all_addresses
        self._capacity = capacity
        self._known: OrderedDict[str, tuple[tuple[str, ...], Timing | None]] = OrderedDict()

    def remember(self, handoff: str, *addresses: str, timing: Timing | None = None) -> None:
        """Store the addresses to ask about a handoff, in this order; empty ones are left out."""
        self._known[handoff] = (tuple(address for address in addresses if address), timing)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def addresses(self, handoff: str) -> tuple[str, ...]:
        """Addresses to ask about a handoff: those of its instances, or all if it is not stored."""
        return self._known.get(handoff, (self._all_addresses, None))[0]

    def timing(self, handoff: str) -> Timing | None:
        """Timing of a handoff; None if it is not stored, or was not dispatched just in time."""
        return self._known.get(handoff, ((), None))[1]


class Results:
    """Asks the control ports of a handoff's instances for its result, D's first.

    Args:
        control: client of control ports.
        recent: addresses of the instances.
        timeout_s: limit for one instance.
    """

    def __init__(self, control: Control, recent: RecentHandoffs, timeout_s: float) -> None:
        self._control = control
        self._recent = recent
        self._timeout_s = timeout_s

    async def ask(self, handoff: str) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Returns the first result, and the addresses that failed before it, with the reason."""
        failures = {}
        for address in self._recent.addresses(handoff):
            try:
                async with asyncio.timeout(self._timeout_s):
                    result = await self._control.result(address, handoff, self._timeout_s)
            except (KVPipeError, OSError) as error:
                failures[address] = str(error) or type(error).__name__
            else:
                if result is not None:
                    return result, failures
        return None, failures


class ResultRecorder:
    """Records the results of ended attempts.

    Args:
        results: the results.
        metrics: counters of results.
        leads: learns D's backlogs from the results.
        failures: log of control ports that do not answer.
    """

    def __init__(self, results: Results, metrics: Metrics, leads: Leads, failures: FailureLog) -> None:
        self._results = results
        self._metrics = metrics
        self._leads = leads
        self._failures = failures
        self._is_closing = asyncio.Event()

    def close(self) -> None:
        """Stop waiting for results that are not there yet."""
        self._is_closing.set()

    async def record(self, handoff: str, decode: Instance, timing: Timing | None, *, is_decode_asked: bool) -> None:
        """Count a handoff, and learn D's backlog from it: the time to read blocks that were ready when D came."""
        result = await self._result(handoff, decode, is_decode_asked=is_decode_asked)
        self._metrics.handoff_ended(result)
        if timing is None or result is None or "backlog_ms" not in result:
            return
        # A failed load does not measure the backlog.
        if result.get("result") == "full":
            self._leads.moved(decode.url, result["backlog_ms"] / 1000, timing.num_bytes)

    async def _result(self, handoff: str, decode: Instance, *, is_decode_asked: bool) -> dict[str, Any] | None:
        """Returns the result; a D that does not know it yet, as after an abort, is asked once more."""
        result, failures = await self._results.ask(handoff)
        if result is None and is_decode_asked and decode.control and decode.control not in failures:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_closing.wait(), _ABORTED_AFTER_S)
            result, failures = await self._results.ask(handoff)
        for address, reason in failures.items():
            self._failures.note("control", address, f"result: {reason}", asyncio.get_running_loop().time())
        return result
