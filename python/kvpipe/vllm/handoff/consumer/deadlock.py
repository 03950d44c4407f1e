"""Ends deadlocks of engines that wait for blocks and have leased their own.

Two full engines may wait for each other: each has leased its blocks to a request of the other one, which cannot load
before blocks are free. A lease that is watched does not end, so one of them must give up a load. Its producer's blocks
are free then, and the request is computed here when there are blocks.
"""

from __future__ import annotations

# A load elsewhere that takes longer counts as one that does not move.
_FIRST_S = 1.0
# The other engine of a pair waits for the first one's blocks meanwhile.
_SECOND_S = 4.0


class DeadlockTimer:
    """Measures how long nothing has moved on this engine for lack of blocks."""

    def __init__(self) -> None:
        self._num_leased_blocks = 0
        self._since_s = 0.0

    def note(self, num_leased_blocks: int, now_s: float) -> None:
        """Notes the number of leased blocks while this engine is stuck; 0 while it is not.

        It is stuck in a step that computes nothing, while no block is there for the request that waits first. A lease
        that begins or ends is progress.
        """
        if num_leased_blocks != self._num_leased_blocks:
            self._num_leased_blocks, self._since_s = num_leased_blocks, now_s

    def is_due(self, ours: bytes, theirs: bytes, now_s: float) -> bool:
        """True if this engine has to give up a load now.

        The incarnations of both engines decide which one is first, so that only one gives up. In a circle of engines
        one at least is before its producer.
        """
        bound_s = _FIRST_S if ours < theirs else _SECOND_S
        if not self._num_leased_blocks or now_s - self._since_s < bound_s:
            return False
        self._since_s = now_s
        return True
