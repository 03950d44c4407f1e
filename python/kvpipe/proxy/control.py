"""The interface to control ports, and a log of failing instances and ports."""

import logging
from collections.abc import Awaitable
from typing import Any, Protocol

from kvpipe.control import Moment

_LOG_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class Describes(Protocol):
    """Something that can be asked for the description of an engine."""

    def describe(self, address: str, timeout: float = ...) -> Awaitable[dict[str, Any]]:
        """Return the engine's description; raises `kvpipe.exceptions.KVPipeError` when the address is not reached."""


class Control(Describes, Protocol):
    """A client of control ports; `kvpipe.control.ControlClient` is one.

    Its methods raise `kvpipe.exceptions.KVPipeError` when the port is not reached or refuses.
    """

    def release(self, address: str, handoff: str, timeout: float = ...) -> Awaitable[bool]:
        """Free a handoff at its producer; False if the producer does not know it."""

    def result(self, address: str, handoff: str, timeout: float = ...) -> Awaitable[dict[str, Any] | None]:
        """Return a handoff's result at `address`; None if it is unknown there."""

    def check(self, address: str, producer: str, timeout: float = ...) -> Awaitable[str]:
        """Have the consumer at `address` connect to a producer. Returns its refusal; empty if it can use it."""

    def subscribe(self, address: str, handoff: str, lead_s: float, timeout: float = ...) -> Awaitable[Moment]:
        """Wait until a prefill at `address` is predicted to end within `lead_s`, has ended, or cannot end."""

    def watched(self, address: str, handoff: str, timeout: float = ...) -> Awaitable[Moment]:
        """Wait until a consumer watches a handoff at `address`, or the handoff has ended."""


class FailureLog:
    """Logs each failing instance or control port at most once a minute, with the number of suppressed lines."""

    def __init__(self) -> None:
        self._logged_at_s: dict[tuple[str, str], float] = {}
        self._num_suppressed: dict[tuple[str, str], int] = {}

    def note(self, role: str, url: str, reason: str, now_s: float) -> bool:
        """Log a failure unless one was logged within a minute. Returns true if it was logged."""
        key = (role, url)
        last_s = self._logged_at_s.get(key)
        if last_s is not None and now_s - last_s < _LOG_INTERVAL_S:
            self._num_suppressed[key] = self._num_suppressed.get(key, 0) + 1
            return False
        self._logged_at_s[key] = now_s
        num_suppressed = self._num_suppressed.pop(key, 0)
        similar = f" ({num_suppressed} similar suppressed)" if num_suppressed else ""
        logger.warning("instance.failed role=%s url=%s reason=%r%s", role, url, reason, similar)
        return True
