"""Requests that take part in a handoff, by request id and by handoff."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class _HasHandoff(Protocol):
    handoff: bytes
    request: Request


T = TypeVar("T", bound=_HasHandoff)


class Handoffs(Generic[T]):
    """Requests of one role, by request id and by handoff. Each handoff belongs to one request."""

    def __init__(self) -> None:
        self._by_request: dict[str, T] = {}
        self._request_ids: dict[bytes, str] = {}
        # Those that `scheduled` yields.
        self._in_steps: dict[str, T] = {}

    def add(self, request_id: str, item: T) -> None:
        """Adds a request.

        Raises:
            ConfigError: Its handoff belongs to another request (n > 1, or a reused id).
        """
        if item.handoff in self._request_ids:
            message = f"handoff {item.handoff.hex()} belongs to request {self._request_ids[item.handoff]}"
            raise ConfigError(message)
        self._by_request[request_id] = self._in_steps[request_id] = item
        self._request_ids[item.handoff] = request_id

    def get(self, request_id: str) -> T | None:
        """Returns the request with this id."""
        return self._by_request.get(request_id)

    def of(self, handoff: bytes) -> T | None:
        """Returns the request of this handoff."""
        return self._by_request.get(self._request_ids.get(handoff, ""))

    def pop(self, request_id: str) -> T | None:
        """Removes and returns a request."""
        item = self._by_request.pop(request_id, None)
        if item is not None:
            del self._request_ids[item.handoff]
            self._in_steps.pop(request_id, None)
        return item

    def settle(self, item: T) -> None:
        """Has `scheduled` leave a request out, until it is unsettled."""
        self._in_steps.pop(item.request.request_id, None)

    def unsettle(self, item: T) -> None:
        """Has `scheduled` yield a request again."""
        self._in_steps[item.request.request_id] = item

    def scheduled(self, output: SchedulerOutput) -> Iterator[tuple[T, int, int]]:
        """Yields `(request, tokens computed before, tokens of this step)` for those that a step computes.

        Settled ones are left out. A step may have a thousand other requests, so that those here are looked up in it.
        """
        counts = output.num_scheduled_tokens
        for request_id, item in list(self._in_steps.items()):
            if request_id in counts:
                # vLLM counts the tokens of this step after it has called the connector.
                yield item, item.request.num_computed_tokens, counts[request_id]

    def values(self) -> list[T]:
        """Returns all requests."""
        return list(self._by_request.values())

    def __len__(self) -> int:
        return len(self._by_request)
