"""Logs failing instances without flooding: each at most once a minute, with a count."""

import logging

_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class FailureLog:
    """Remembers when each instance was last logged."""

    def __init__(self) -> None:
        self._logged_at_s: dict[tuple[str, str], float] = {}
        self._num_unlogged: dict[tuple[str, str], int] = {}

    def note(self, role: str, url: str, reason: str, now_s: float) -> bool:
        """Count one failure and log it when its instance's minute is over; True when logged."""
        key = (role, url)
        last_s = self._logged_at_s.get(key)
        if last_s is not None and now_s - last_s < _INTERVAL_S:
            self._num_unlogged[key] = self._num_unlogged.get(key, 0) + 1
            return False
        self._logged_at_s[key] = now_s
        num_unlogged = self._num_unlogged.pop(key, 0)
        logger.warning("instance.failed role=%s url=%s reason=%r unlogged=%d", role, url, reason, num_unlogged)
        return True
