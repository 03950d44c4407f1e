"""Results of handoffs: who to ask for one, and what is counted and learned from it."""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.control import Control, FailureLog
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.just_in_time import Leads, Timing
from kvpipe.proxy.metrics import Metrics

# About 4 MB; older handoffs are looked for at every instance.
_MAX_REMEMBERED = 10_000
# An abort reaches D's scheduler between two steps; on CPUs one takes up to 1.3 s.
_ABORTED_AFTER_S = 2.0


class RecentHandoffs:
    """Control addresses and timing by handoff id, for the latest handoffs."""

    def __init__(self, everyone: tuple[str, ...], capacity: int = _MAX_REMEMBERED) -> None:
        self._everyone = everyone
        self._capacity = capacity
        self._known: OrderedDict[str, tuple[tuple[str, ...], Timing | None]] = OrderedDict()

    def remember(self, handoff: str, *addresses: str, timing: Timing | None = None) -> None:
        """Note whom to ask about a handoff, in this order; empty addresses are left out."""
        self._known[handoff] = (tuple(address for address in addresses if address), timing)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def addresses(self, handoff: str) -> tuple[str, ...]:
        """Whom to ask: the instances of that handoff, or everyone when it is not remembered."""
        return self._known.get(handoff, (self._everyone, None))[0]

    def timing(self, handoff: str) -> Timing | None:
        """How it was timed; None when that is not remembered, or was not a matter of prediction."""
        return self._known.get(handoff, ((), None))[1]


class Results:
    """Asks the control ports of the instances that a handoff ran on, D's first.

    Args:
        control: control ports.
        recent: which instances these are.
        timeout_s: for one of them.
    """

    def __init__(self, control: Control, recent: RecentHandoffs, timeout_s: float) -> None:
        self._control = control
        self._recent = recent
        self._timeout_s = timeout_s

    async def ask(self, handoff: str) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """The first result that is told, and who could not be asked before that, with the reason."""
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
    """Asks for the results of attempts that have ended.

    Args:
        results: whom to ask.
        metrics: where they are counted.
        leads: which learn D's backlogs from them.
        failures: where a port that does not answer is logged.
    """

    def __init__(self, results: Results, metrics: Metrics, leads: Leads, failures: FailureLog) -> None:
        self._results = results
        self._metrics = metrics
        self._leads = leads
        self._failures = failures
        self._is_closing = asyncio.Event()

    def close(self) -> None:
        """From now on nothing is waited for but answers."""
        self._is_closing.set()

    async def record(self, handoff: str, decode: Instance, timing: Timing | None, *, is_decode_asked: bool) -> None:
        """Count a handoff, and if it was timed, learn from it how long that D read what was final when it came."""
        result = await self._result(handoff, decode, is_decode_asked=is_decode_asked)
        self._metrics.handoff_ended(result)
        if timing is None or result is None or "backlog_ms" not in result:
            return
        # Of a load that failed it is no measure.
        if result.get("result") == "full":
            self._leads.moved(decode.url, result["backlog_ms"] / 1000, timing.num_bytes)

    async def _result(self, handoff: str, decode: Instance, *, is_decode_asked: bool) -> dict[str, Any] | None:
        """What is known of it; a D that was asked and knows nothing, as after an abort, is asked once more."""
        result, failures = await self._results.ask(handoff)
        if result is None and is_decode_asked and decode.control and decode.control not in failures:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_closing.wait(), _ABORTED_AFTER_S)
            result, failures = await self._results.ask(handoff)
        for address, reason in failures.items():
            self._failures.note("control", address, f"result: {reason}", asyncio.get_running_loop().time())
        return result
