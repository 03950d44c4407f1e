"""Reports of one rank's leases to vLLM, each exactly once. The module knows neither vLLM nor the agent."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvpipe.vllm.handoff.metadata import HandoffLease


class RankLeases:
    """Finished requests whose blocks are leased to consumers, until they have been read or withdrawn."""

    def __init__(self) -> None:
        self._leased: dict[bytes, str] = {}
        self._ended: set[bytes] = set()
        self._acknowledged: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._leased)

    def __contains__(self, handoff: bytes) -> bool:
        return handoff in self._leased

    def add(self, lease: HandoffLease) -> None:
        """Adds a request."""
        self._leased[lease.handoff] = lease.request_id

    def ended(self, handoff: bytes) -> None:
        """The scheduler role has ended a handoff."""
        self._ended.add(handoff)

    def acknowledged(self, handoff: bytes) -> None:
        """A consumer has all blocks of a handoff. This rank may not know of the lease yet."""
        self._acknowledged.add(handoff)

    def drain_sent(self) -> set[str]:
        """Returns requests whose lease has ended."""
        if not (self._ended or self._acknowledged):
            return set()
        over = (self._ended | self._acknowledged) & self._leased.keys()
        # A handoff that ends before its request has finished is never leased.
        self._acknowledged -= over | self._ended
        self._ended.clear()
        return {self._leased.pop(handoff) for handoff in over}
