"""A request whose KV another engine reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpipe.vllm.handoff.metadata import ReadyRange

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.vllm.handoff.cache_groups import CacheGroups


@dataclass
class Produced:
    """A request whose KV another engine reads.

    Attributes:
        handoff: The handoff's id.
        request: vLLM's request.
        groups: KV cache groups of this engine.
        prompt_hash: Hash of its prompt, which consumers compare.
        num_cached_tokens: Prompt tokens found in this engine's prefix cache.
        next_positions: For each group, the position in vLLM's list of the next block to announce.
        announced_ids: Blocks that the worker role announces or has announced.
        is_open: True if the handoff is open: the request is scheduled, and consumers know that.
        is_leased: True if the request has finished and its blocks are leased.
        num_leased_blocks: Blocks that are leased.
        is_withdrawn: True if the blocks are withdrawn: no consumer may read them.
    """

    handoff: bytes
    request: Request
    groups: CacheGroups
    prompt_hash: bytes = b""
    num_cached_tokens: int | None = None
    next_positions: list[int] = field(init=False)
    announced_ids: set[int] = field(default_factory=set)
    is_open: bool = False
    is_leased: bool = False
    num_leased_blocks: int = 0
    is_withdrawn: bool = False

    def __post_init__(self) -> None:
        self.next_positions = [group.first_needed(self.num_prompt_tokens) for group in self.groups]

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return int(self.request.num_prompt_tokens)

    def ready(self, index: int, num_tokens: int) -> range:
        """Returns positions of the blocks of a group that are ready after `num_tokens`, and not announced."""
        ready = self.groups[index].ready(self.num_prompt_tokens, num_tokens)
        return range(self.next_positions[index], ready.stop)

    def announce(self, index: int, block_ids: list[int]) -> list[ReadyRange]:
        """Returns the announcement of the next blocks of a group, or none."""
        first = self.next_positions[index] - self.groups[index].num_uncounted(self.num_prompt_tokens)
        self.next_positions[index] += len(block_ids)
        self.announced_ids.update(block_ids)
        return [ReadyRange(self.handoff, first, block_ids, index)] if block_ids else []
