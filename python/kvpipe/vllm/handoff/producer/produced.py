"""A request whose KV another engine reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpipe.vllm.handoff.metadata import ReadyRange

if TYPE_CHECKING:
    from vllm.v1.request import Request


@dataclass
class Produced:
    """A request whose KV another engine reads.

    Attributes:
        handoff: The handoff's id.
        request: vLLM's request.
        num_cached_tokens: Prompt tokens found in this engine's prefix cache.
        num_announced: Blocks that the worker role announces or has announced.
        announced_ids: Those blocks.
        is_open: True if the handoff is open: the request is scheduled, and consumers know that.
        is_leased: True if the request has finished and its blocks are leased.
        num_leased_blocks: Blocks that are leased.
        is_withdrawn: True if the blocks are withdrawn: no consumer may read them.
    """

    handoff: bytes
    request: Request
    num_cached_tokens: int | None = None
    num_announced: int = 0
    announced_ids: set[int] = field(default_factory=set)
    is_open: bool = False
    is_leased: bool = False
    num_leased_blocks: int = 0
    is_withdrawn: bool = False

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return int(self.request.num_prompt_tokens)

    def num_ready(self, num_tokens: int, block_size: int) -> int:
        """Returns the number of blocks ready after `num_tokens`: full ones, and the last one with the prompt's end."""
        if num_tokens >= self.num_prompt_tokens:
            return -(-self.num_prompt_tokens // block_size)
        return num_tokens // block_size

    def announce(self, block_ids: list[int]) -> list[ReadyRange]:
        """Returns the announcement of the next blocks, or none."""
        first = self.num_announced
        self.num_announced += len(block_ids)
        self.announced_ids.update(block_ids)
        return [ReadyRange(self.handoff, first, block_ids)] if block_ids else []
