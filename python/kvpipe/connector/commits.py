"""Loads that the scheduler role commits itself, because it learns first that blocks and sequence state are complete."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from kvpipe.connector.metadata import merge

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

    from kvpipe.connector.requests import Consumed


class Commits:
    """Verified loads that wait for their sequence state, and committed loads that vLLM does not know of yet.

    A load whose blocks are verified before its sequence state arrives is committed here. In the other order the workers
    end it: they receive the state, and report once they have the blocks. A load ends in one of these ways, never both.

    Args:
        num_ranks: Workers of this engine; each reports its own blocks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._verified: set[str] = set()
        self._committed: set[str] = set()
        # Until the workers acknowledge the commit; they do not report the load afterwards.
        self._unacknowledged: dict[bytes, str] = {}

    def blocks_verified(self, request_id: str, consumed: Consumed, ranks: list[dict[str, Any]]) -> None:
        """Notes that some ranks, or all, have verified all blocks of a load."""
        if consumed.phase != "loading" or consumed.ending or consumed.has_state or consumed.outcome is not None:
            # An outcome means that a rank has ended the load; the other ranks will too.
            return
        consumed.verified += ranks
        if len(consumed.verified) == self._num_ranks:
            self._verified.add(request_id)

    def state_received(self, request_id: str, consumed: Consumed) -> bool:
        """Returns whether the arrival of the sequence state commits the load."""
        if request_id not in self._verified:
            return False
        self._verified.remove(request_id)
        self._committed.add(request_id)
        self._unacknowledged[consumed.handoff] = request_id
        consumed.outcome = functools.reduce(merge, consumed.verified)
        return True

    def is_over(self, request_id: str) -> None:
        """Forgets a load that the workers end, or that has ended on one of them."""
        self._verified.discard(request_id)

    def drop_unacknowledged(self, output: KVConnectorOutput) -> None:
        """Removes committed loads from the workers' report: vLLM fails when a load is reported twice."""
        if output.finished_recving:
            output.finished_recving = output.finished_recving - set(self._unacknowledged.values())

    def is_unacknowledged(self, handoff: bytes) -> bool:
        """Whether a load is committed and the workers have not acknowledged that."""
        return handoff in self._unacknowledged

    def acknowledged(self, handoff: bytes) -> None:
        """Notes that the workers know of a commit."""
        self._unacknowledged.pop(handoff, None)

    def report(self, output: KVConnectorOutput) -> None:
        """Adds committed loads to `finished_recving`, which vLLM reads after this hook."""
        if self._committed:
            output.finished_recving = (output.finished_recving or set()) | self._committed
            self._committed = set()
