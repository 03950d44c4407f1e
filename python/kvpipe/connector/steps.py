"""What vLLM's scheduler has put into a step, as the scheduler role needs to know it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput


def scheduled(output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """`(request_id, computed before, computed in this step)` of every scheduled request."""
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, counts.get(new.req_id, 0)
    cached = output.scheduled_cached_reqs
    for request_id, num_before in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, num_before, counts.get(request_id, 0)


def written_blocks(
    output: SchedulerOutput, manager: KVCacheManager, num_local_tokens: Mapping[str, int], block_size: int
) -> set[int]:
    """Blocks that this step writes, which vLLM shares by their hash already: they count as cached once scheduled.

    Args:
        output: The step.
        manager: Knows the blocks of each request.
        num_local_tokens: Of the requests that were admitted in this step, the tokens found in the own prefix cache.
            What lies between them and those computed before is loaded within this step by another connector.
        block_size: Tokens in a block.
    """
    written: set[int] = set()
    for request_id, num_before, num_new in scheduled(output):
        first = num_local_tokens.get(request_id, num_before) // block_size
        end = -(-(num_before + num_new) // block_size)
        written.update(manager.get_block_ids(request_id)[0][first:end])
    return written
