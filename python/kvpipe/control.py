"""Questions to the control ports of instances: who are you, release a handoff, when does it end, how did it end."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from kvpipe import _kvpipe
from kvpipe.config import resolve_token
from kvpipe.exceptions import ConfigError
from kvpipe.work import Work

_HANDOFF_BYTES = 16


def parse_handoff(handoff: object) -> bytes:
    """A handoff id as 16 bytes, from its 32 hex digits.

    Raises:
        ConfigError: It is something else.
    """
    try:
        parsed = bytes.fromhex(handoff) if isinstance(handoff, str) else b""
    except ValueError:
        parsed = b""
    if len(parsed) != _HANDOFF_BYTES:
        message = f"handoff={handoff!r}: expected 32 hex digits"
        raise ConfigError(message)
    return parsed


@dataclass(frozen=True, slots=True)
class Moment:
    """What ended a subscription to a handoff.

    Attributes:
        kind: `due`: the predicted end of the prefill is no further away than was asked. `finished`: the prefill has
            ended. `watched`: a consumer has come. `gone`: nothing of that will come.
        remaining_s: Seconds from the instance's answer to the predicted end, 0 when it has passed: with `due`, and
            with `finished` if there was a prediction; otherwise `None`.
        reason: With `gone`, why.
    """

    kind: Literal["due", "finished", "watched", "ended"]
    remaining_s: float | None = None
    reason: str = ""


class ControlClient:
    """Asks control ports. Connections are made on demand, authenticated, and kept.

    Any thread may call; nothing blocks: wait for or await the returned `Work`. Its errors: `ConnectError`,
    `AuthenticationError`, `IncompatiblePeerError`, `PeerLostError`, `TransferTimeoutError`; all can be asked again.

    Args:
        token: The shared secret; by default `KVPIPE_TOKEN`.
    """

    def __init__(self, token: str | None = None) -> None:
        self._native = _kvpipe.Control(None, resolve_token(token), "client")

    def describe(self, address: str, timeout: float = 5.0) -> Work[dict[str, Any]]:
        """What the instance says about itself."""
        return Work(self._native.ask_description(address, timeout), json.loads)

    def release(self, address: str, handoff: str, timeout: float = 5.0) -> Work[bool]:
        """Gives the blocks of a handoff back; whether the instance knew it."""
        return Work(self._native.ask_release(address, parse_handoff(handoff), timeout), json.loads)

    def result(self, address: str, handoff: str, timeout: float = 5.0) -> Work[dict[str, Any] | None]:
        """How a handoff ended at this instance; `None` when it does not know."""
        return Work(self._native.ask_result(address, parse_handoff(handoff), timeout), json.loads)

    def subscribe(self, address: str, handoff: str, lead_s: float, timeout: float = 300.0) -> Work[Moment]:
        """Waits until the prefill of a handoff is about to end at the producer: `due`, `finished` or `gone`.

        Without a prediction, as for the first request of an engine, `finished` is the first that is said. A handoff
        that the producer does not know is waited for as long as its `open_timeout_s` says.

        Args:
            address: Control port of the producer.
            handoff: Its id, 32 hex digits.
            lead_s: How long before the predicted end to be told, in seconds, 0 or more.
            timeout: Seconds until the work ends with `TransferTimeoutError`. The producer forgets the subscription
                when the handoff ends.

        Raises:
            ConfigError: The id or a number of seconds is none.
        """
        return Work(self._native.ask_subscription(address, parse_handoff(handoff), lead_s, timeout), _moment)

    def watched(self, address: str, handoff: str, timeout: float = 300.0) -> Work[Moment]:
        """Waits until a consumer watches a handoff at the producer: `watched` or `gone`.

        Arguments and errors are those of `subscribe`. D's scheduler watches when the request has reached it.
        """
        return Work(self._native.ask_watched(address, parse_handoff(handoff), timeout), _moment)

    def close(self) -> None:
        """Ends all connections; what is under way ends with `ClosedError`."""
        self._native.close()


def _moment(answer: str) -> Moment:
    told = json.loads(answer)
    return Moment(told["moment"], told.get("remaining_s"), told.get("reason", ""))
