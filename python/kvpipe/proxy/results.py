"""Results of handoffs: where to ask for them, and what the proxy counts and learns from them."""

import asyncio
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.control import Control, FailureLog
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.just_in_time import Leads, Timing
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.request_record import RequestRecord

# About 7 MB.
_MAX_REMEMBERED = 10_000
# An abort reaches D's scheduler between two steps; on CPUs one takes up to 1.3 s.
_ABORTED_AFTER_S = 2.0


@dataclass(slots=True)
class RecentHandoff:
    """The proxy's knowledge of a handoff.

    Attributes:
        addresses: control addresses to ask about it, in this order.
        record: the client's request.
        timing: timing of D's part, with just-in-time dispatch.
        continued_as: handoff by which another D has gone on after the early token; empty if none has.
    """

    addresses: tuple[str, ...]
    record: RequestRecord
    timing: Timing | None
    continued_as: str = ""


class RecentHandoffs:
    """The latest handoffs, by id."""

    def __init__(self, capacity: int = _MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._known: OrderedDict[str, RecentHandoff] = OrderedDict()

    def remember(self, handoff: str, *addresses: str, record: RequestRecord, timing: Timing | None) -> None:
        """Store a handoff; empty addresses are left out."""
        self._known[handoff] = RecentHandoff(tuple(filter(None, addresses)), record, timing)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def begun(self, handoff: str, decode_control: str) -> None:
        """Note that a D has begun with the answer, which is asked about the handoff before others."""
        if (known := self._known.get(handoff)) is not None:
            others = (address for address in known.addresses if address != decode_control)
            known.addresses = (decode_control, *others)

    def continued(self, handoff: str, by: str) -> None:
        """Note that a stream continues under another handoff."""
        if (known := self._known.get(handoff)) is not None:
            known.continued_as = by

    def get(self, handoff: str) -> RecentHandoff | None:
        """The handoff; None if it is not stored."""
        return self._known.get(handoff)

    def answering(self, handoff: str) -> str:
        """The handoff of the D that answered the client who has this id."""
        while (known := self._known.get(handoff)) is not None and known.continued_as:
            handoff = known.continued_as
        return handoff


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
        failures: dict[str, str] = {}
        recent = self._recent.get(handoff)
        for address in recent.addresses if recent is not None else ():
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
        leads: learns D's steps and backlogs from the results.
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

    async def record(
        self, handoff: str, decode: Instance, timing: Timing | None, *, is_decode_asked: bool
    ) -> dict[str, Any] | None:
        """Count a handoff, and learn D's steps and backlog from it: until its load began, and had read what was ready.

        Returns the result; None if no instance knows it.
        """
        result = await self._result(handoff, decode, is_decode_asked=is_decode_asked)
        self._metrics.handoff_ended(result)
        # A failed load measures neither.
        if timing is not None and result is not None and "backlog_ms" in result and result.get("result") == "full":
            self._leads.moved(decode.name, result["backlog_ms"] / 1000, timing.num_bytes)
            self._leads.stepped(decode.name, result.get("steps_ms", 0.0) / 1000)
        return result

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
