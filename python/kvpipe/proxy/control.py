"""What the proxy asks of control ports, and the log of those that fail."""

import logging
from collections.abc import Awaitable
from typing import Any, Literal, Protocol

_LOG_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class Moment(Protocol):
    """What ended a subscription; `kvpipe.control.Moment` is one."""

    @property
    def kind(self) -> Literal["due", "finished", "watched", "gone"]:
        """What has come about."""

    @property
    def remaining_s(self) -> float | None:
        """With `due`, and with `finished` if there was a prediction: seconds to the predicted end; else None."""

    @property
    def reason(self) -> str:
        """With `gone`: why."""


class Control(Protocol):
    """A client of control ports; `kvpipe.control.ControlClient` is one.

    Its methods raise `kvpipe.exceptions.KVPipeError` when the port is not reached or refuses.
    """

    def release(self, address: str, handoff: str, timeout: float = ...) -> Awaitable[bool]:
        """Let the producer at `address` free a handoff; False when it does not know it."""

    def result(self, address: str, handoff: str, timeout: float = ...) -> Awaitable[dict[str, Any] | None]:
        """What became of a handoff, as `address` sees it; None when it does not know it."""

    def describe(self, address: str, timeout: float = ...) -> Awaitable[dict[str, Any]]:
        """What an engine says of itself."""

    def subscribe(self, address: str, handoff: str, lead_s: float, timeout: float = ...) -> Awaitable[Moment]:
        """Wait until a prefill at `address` is predicted to end within `lead_s`, has ended, or never will."""

    def watched(self, address: str, handoff: str, timeout: float = ...) -> Awaitable[Moment]:
        """Wait until a consumer watches a handoff at `address`, or none will."""


class FailureLog:
    """Remembers when each instance was last logged."""

    def __init__(self) -> None:
        self._logged_at_s: dict[tuple[str, str], float] = {}
        self._num_suppressed: dict[tuple[str, str], int] = {}

    def note(self, role: str, url: str, reason: str, now_s: float) -> bool:
        """Count one failure and log it when its instance's minute is over; True when logged."""
        key = (role, url)
        last_s = self._logged_at_s.get(key)
        if last_s is not None and now_s - last_s < _LOG_INTERVAL_S:
            self._num_suppressed[key] = self._num_suppressed.get(key, 0) + 1
            return False
        self._logged_at_s[key] = now_s
        num_suppressed = self._num_suppressed.pop(key, 0)
        logger.warning("instance.failed role=%s url=%s reason=%r suppressed=%d", role, url, reason, num_suppressed)
        return True
