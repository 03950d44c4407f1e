"""What the proxy asks of control ports."""

from collections.abc import Awaitable
from typing import Any, Literal, Protocol


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
