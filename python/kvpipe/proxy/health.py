"""Health of one instance: what its failures and its answers to probes say of it.

Pure: no input or output, no clock.
"""

from __future__ import annotations

import math
from typing import Literal

# An instance that has failed is asked after the others for so long.
_AVOIDED_S = 5.0


class Health:
    """Health of one instance.

    An instance is *frozen* when it has been silent for too long: none of its ports answers a probe. It gets nothing
    until it answers one by HTTP. Then it is *half-open*: one request is its *trial*, and the next one follows when that
    has ended. One that is only slow, or has failed, is asked after the others.

    The data-parallel ranks of a server share its HTTP port: while one of them is frozen, none gets a request.

    Args:
        frozen_after_s: silence after which it is frozen.
        frozen_ranks: those of its server's data-parallel ranks that are frozen; all of these ranks share the set.
    """

    def __init__(self, frozen_after_s: float, frozen_ranks: set[Health] | None = None) -> None:
        self._frozen_after_s = frozen_after_s
        self._frozen_ranks = set() if frozen_ranks is None else frozen_ranks
        self._state: Literal["up", "frozen", "half-open", "trial"] = "up"
        self._failed_at_s = -math.inf
        self._silent_s = 0.0
        self._is_slow = False

    @property
    def is_frozen(self) -> bool:
        """True while it is frozen."""
        return self._state == "frozen"

    @property
    def is_server_frozen(self) -> bool:
        """True while it or another rank of its server is frozen."""
        return bool(self._frozen_ranks)

    @property
    def takes_requests(self) -> bool:
        """True while a request may be sent to it."""
        return self._state in ("up", "half-open") and not self._frozen_ranks

    @property
    def needs_trial(self) -> bool:
        """True while it is half-open: the next request is its trial."""
        return self._state == "half-open"

    @property
    def is_doubtful(self) -> bool:
        """True while probes go on although it owes nothing."""
        return self.is_frozen or self._is_slow

    def is_avoided(self, now_s: float) -> bool:
        """Returns true if it is asked after the others."""
        has_failed = now_s - self._failed_at_s < _AVOIDED_S
        return has_failed or self._is_slow or not self.takes_requests

    @property
    def left_s(self) -> float:
        """Seconds of silence until it is frozen; 0 or less when it is."""
        return self._frozen_after_s - self._silent_s

    def failed(self, now_s: float) -> None:
        """Note that it has failed a request."""
        self._failed_at_s = now_s
        self._end_trial("up")

    def served(self) -> None:
        """Note that it has begun to answer a request."""
        self._silent_s = 0.0
        self._end_trial("up")

    def asked(self) -> bool:
        """Note that a request goes to it; returns true if that is its trial."""
        is_trial = self.needs_trial
        if is_trial:
            self._state = "trial"
        return is_trial

    def trial_left(self) -> None:
        """Note that its trial has been taken from it before its answer."""
        self._end_trial("half-open")

    def silent(self, seconds: float) -> None:
        """Note that no port has answered a probe for so long."""
        self._silent_s += seconds

    def answered(self, *, is_http: bool) -> None:
        """Note that a port has answered a probe; a control port does so while HTTP is slow."""
        self._silent_s = 0.0
        if is_http:
            self._is_slow = False
            if self.is_frozen:
                self._state = "half-open"
                self._frozen_ranks.discard(self)

    def slow(self) -> None:
        """Note that HTTP has not answered a probe in time."""
        self._is_slow = True

    def freeze(self) -> bool:
        """Freeze it if it has been silent for too long. Returns true if that is new."""
        is_new = not self.is_frozen and self.left_s <= 0
        if is_new:
            self._state = "frozen"
            self._frozen_ranks.add(self)
        return is_new

    def _end_trial(self, state: Literal["up", "half-open"]) -> None:
        if self._state == "trial":
            self._state = state
