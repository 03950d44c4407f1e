"""What the proxy asks of control ports."""

from collections.abc import Awaitable
from typing import Any, Protocol


class Control(Protocol):
    """A client of control ports; `kvpipe.control.ControlClient` is one.

    Its methods raise `kvpipe.exceptions.KVPipeError` when the port is not reached or refuses.
    """

    def release(self, address: str, handoff: str, timeout: float = ...) -> Awaitable[bool]:
        """Let the producer at `address` free a handoff; False when it does not know it."""

    def result(self, address: str, handoff: str, timeout: float = ...) -> Awaitable[dict[str, Any] | None]:
        """What became of a handoff, as `address` sees it; None when it does not know it."""
