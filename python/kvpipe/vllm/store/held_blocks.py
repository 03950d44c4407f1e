"""Blocks whose KV is being copied out of a GPU, and that vLLM must not give to another request before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


@dataclass
class _Hold:
    """Blocks that are held.

    Attributes:
        pool: vLLM's pool, which has them.
        blocks: The blocks.
        num_ranks_left: Ranks that have not copied them.
    """

    pool: BlockPool
    blocks: list[KVCacheBlock]
    num_ranks_left: int


class HeldBlocks:
    """Holds blocks as a request would that shares them, until all ranks have copied them.

    A request that ends or is preempted frees its blocks at once. The next one that gets them writes into them, while
    copies of the last step are still to run. Copies in host memory are made by the hook itself: nothing is held.

    Args:
        num_ranks: Workers of the engine.
        is_async: True if the workers copy after their hooks have returned.
    """

    def __init__(self, num_ranks: int, *, is_async: bool) -> None:
        self._num_ranks = num_ranks
        self._is_async = is_async
        self._manager: KVCacheManager | None = None
        self._held: dict[int, _Hold] = {}
        self._num_holds = 0

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Stores the manager, which has the blocks."""
        self._manager = manager

    def hold(self, block_ids: Sequence[int]) -> int:
        """Holds blocks of a running request; the number of the hold, 0 if none is needed."""
        if not self._is_async or self._manager is None:
            return 0
        pool = self._manager.block_pool
        blocks = [pool.blocks[block_id] for block_id in block_ids]
        pool.touch(blocks)
        self._num_holds += 1
        self._held[self._num_holds] = _Hold(pool, blocks, self._num_ranks)
        return self._num_holds

    def copied(self, num_ranks: Mapping[int, int]) -> None:
        """So many more ranks have copied the blocks of each hold. Those that all ranks have are free again."""
        for number, num in num_ranks.items():
            hold = self._held[number]
            hold.num_ranks_left -= num
            if hold.num_ranks_left == 0:
                del self._held[number]
                # As vLLM frees a request's blocks: the last one is evicted first.
                hold.pool.free_blocks(reversed(hold.blocks))

    def __len__(self) -> int:
        return len(self._held)
