"""Questions to the control ports of instances: who are you, release a handoff, how did it end."""

from __future__ import annotations

import json
from typing import Any

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

    def close(self) -> None:
        """Ends all connections; what is under way ends with `ClosedError`."""
        self._native.close()
