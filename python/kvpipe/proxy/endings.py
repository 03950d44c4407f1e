"""What is counted and learned of an attempt at a handoff that has ended: its result, by one question."""

import asyncio
from contextlib import suppress
from typing import Any

from kvpipe.proxy.failures import FailureLog
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.just_in_time import Leads, Timing
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.results import Results

# An abort reaches D's scheduler between two steps; on CPUs one takes up to 1.3 s.
_ABORTED_AFTER_S = 2.0


class Endings:
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

    async def take(self, handoff: str, decode: Instance, timing: Timing | None, *, is_decode_asked: bool) -> None:
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
