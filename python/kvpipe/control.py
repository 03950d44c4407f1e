"""A client of control ports: describes engines, releases handoffs, waits for their progress, returns their results."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from kvpipe import _kvpipe
from kvpipe.config import resolve_token
from kvpipe.exceptions import ConfigError
from kvpipe.work import Work

_HANDOFF_BYTES = 16
# Characters of a wrong id that a message shows.
_SHOWN = 64


def parse_handoff(handoff: object) -> bytes:
    """Converts a handoff id of 32 hex digits to 16 bytes.

    Raises:
        ConfigError: The id has another form.
    """
    try:
        parsed = bytes.fromhex(handoff) if isinstance(handoff, str) else b""
    except ValueError:
        parsed = b""
    if len(parsed) != _HANDOFF_BYTES:
        shown = repr(handoff[:_SHOWN]) if isinstance(handoff, str) else type(handoff).__name__
        message = f"handoff={shown}: expected 32 hex digits"
        raise ConfigError(message)
    return parsed


@dataclass(frozen=True, slots=True)
class Moment:
    """The event that ended a subscription to a handoff.

    Attributes:
        kind: `due`: the predicted end of the prefill is at most the lead away. `finished`: the prefill has ended.
            `watched`: a consumer watches the handoff. `ended`: the handoff has ended without that event.
        remaining_s: Seconds from the instance's answer to the predicted end, 0 if it has passed. Set with `due`, and
            with `finished` if there was a prediction; otherwise `None`.
        reason: The reason of `ended`.
    """

    kind: Literal["due", "finished", "watched", "ended"]
    remaining_s: float | None = None
    reason: str = ""


class ControlClient:
    """A client of control ports. It opens authenticated sessions on demand and keeps them.

    Any thread may call, and no call blocks: wait for the returned `Work`, or await it. Its errors are `ConnectError`,
    `AuthenticationError`, `IncompatiblePeerError`, `PeerLostError` and `TransferTimeoutError`; the client stays usable.

    Args:
        token: The shared secret; by default `KVPIPE_TOKEN`.
    """

    def __init__(self, token: str | None = None) -> None:
        self._native = _kvpipe.Control(None, resolve_token(token), "client")

    def describe(self, address: str, timeout: float = 5.0) -> Work[dict[str, Any]]:
        """Returns the instance's description of itself."""
        return Work(self._native.ask_description(address, timeout), json.loads)

    def release(self, address: str, handoff: str, timeout: float = 5.0) -> Work[bool]:
        """Releases the blocks of a handoff. Returns true if the instance knew it."""
        return Work(self._native.ask_release(address, parse_handoff(handoff), timeout), bool)

    def result(self, address: str, handoff: str, timeout: float = 5.0) -> Work[dict[str, Any] | None]:
        """Returns a handoff's result at this instance; `None` if the instance does not know it."""
        return Work(self._native.ask_result(address, parse_handoff(handoff), timeout), _document)

    def subscribe(self, address: str, handoff: str, lead_s: float, timeout: float = 300.0) -> Work[Moment]:
        """Waits until the prefill of a handoff is about to end at the producer: `due`, `finished` or `ended`.

        Without a prediction, as for an engine's first request, the first event is `finished`. The producer waits for
        an unknown handoff for its `open_timeout_s`.

        Args:
            address: Control port of the producer.
            handoff: Id of the handoff, 32 hex digits.
            lead_s: Seconds before the predicted end at which the work ends, 0 or more.
            timeout: Seconds until the work ends with `TransferTimeoutError`. The producer keeps the subscription until
                the handoff ends.

        Raises:
            ConfigError: The id or a number of seconds is invalid.
        """
        return Work(self._native.ask_subscription(address, parse_handoff(handoff), lead_s, timeout), _moment)

    def watched(self, address: str, handoff: str, timeout: float = 300.0) -> Work[Moment]:
        """Waits until a consumer watches a handoff at the producer: `watched` or `ended`.

        Arguments and errors are those of `subscribe`. D's scheduler watches the handoff when it receives the request.
        """
        return Work(self._native.ask_watched(address, parse_handoff(handoff), timeout), _moment)

    def check(self, address: str, producer: str, timeout: float = 5.0) -> Work[str]:
        """Has a consumer connect to a producer, which compares tokens and fingerprints.

        Args:
            address: Control port of the consumer.
            producer: Control port of the producer, as the consumer reaches it. The consumer connects to hosts of its
                `allowed_producers` only.
            timeout: Seconds until the work ends with `TransferTimeoutError`.

        Returns:
            Why the consumer cannot use that producer; empty if it can.
        """
        return Work(self._native.ask_check(address, producer, timeout), str)

    def close(self) -> None:
        """Closes all sessions; pending works end with `ClosedError`."""
        self._native.close()


def _document(text: str | None) -> dict[str, Any] | None:
    return None if text is None else json.loads(text)


def _moment(event: tuple[Literal["due", "finished", "watched", "ended"], float | None, str]) -> Moment:
    return Moment(*event)
