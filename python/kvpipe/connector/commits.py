"""Loads that end here, because this role knows first that their blocks and their sequence state are both here."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from kvpipe.connector.metadata import merge

if TYPE_CHECKING:
    from vllm.v1.outputs import KVConnectorOutput

    from kvpipe.connector.requests import Consumed


class Commits:
    """Which requests lack the sequence state only, and which do not any more though vLLM has not been told.

    What is whole before its sequence state comes is committed here. In the other order the workers end the load: they
    are told of the state, and report when they have the blocks. A load takes one way or the other, never both.

    Args:
        num_ranks: Of this engine; each of them says that it has all blocks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._verified: set[str] = set()
        self._committed: set[str] = set()
        # Until the workers have said that they report nothing of them any more.
        self._unacknowledged: dict[bytes, str] = {}

    def blocks_verified(self, request_id: str, consumed: Consumed, ranks: list[dict[str, Any]]) -> None:
        """Some ranks, perhaps all, have all blocks of a load, proved."""
        if consumed.phase != "loading" or consumed.ending or consumed.has_state or consumed.outcome is not None:
            # With an outcome, a rank has ended it: the others do too.
            return
        consumed.verified += ranks
        if len(consumed.verified) == self._num_ranks:
            self._verified.add(request_id)

    def state_received(self, request_id: str, consumed: Consumed) -> bool:
        """The sequence state has come: whether that commits the load."""
        if request_id not in self._verified:
            return False
        self._verified.remove(request_id)
        self._committed.add(request_id)
        self._unacknowledged[consumed.handoff] = request_id
        consumed.outcome = functools.reduce(merge, consumed.verified)
        return True

    def is_over(self, request_id: str) -> None:
        """The load ends by the workers' word, or has on one of them."""
        self._verified.discard(request_id)

    def drop_unacknowledged(self, output: KVConnectorOutput) -> None:
        """Loads that the workers report as ended; never a second time what was committed: vLLM would die of it."""
        if output.finished_recving:
            output.finished_recving = output.finished_recving - set(self._unacknowledged.values())

    def is_unacknowledged(self, handoff: bytes) -> bool:
        """Whether a load was committed, and the workers may not know yet."""
        return handoff in self._unacknowledged

    def acknowledged(self, handoff: bytes) -> None:
        """The workers know, and have told the producer."""
        self._unacknowledged.pop(handoff, None)

    def report(self, output: KVConnectorOutput) -> None:
        """Adds what was committed to what vLLM may schedule from its next step on; it looks at that after our hook."""
        if self._committed:
            output.finished_recving = (output.finished_recving or set()) | self._committed
            self._committed = set()
