"""Ranks of a producer from which a rank of this engine loads, where tensor parallel sizes differ.

Each rank has some KV heads, in the order of the ranks. Where there are more ranks than heads, adjacent ranks have a
copy of one head. A block has its heads one after the other in memory, so that several of them are a slice of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpipe.exceptions import ConfigError


@dataclass(frozen=True)
class RankSource:
    """A rank of the producer from which a rank of this engine loads.

    A slice is `(index, count)`; `None` is all of a block.

    Attributes:
        rank: The producer's rank.
        destination_slice: The slice of the blocks here that the load fills.
        source_slice: The slice of the producer's blocks that it reads.
        is_shared: True if other ranks here load from that rank, too.
    """

    rank: int
    destination_slice: tuple[int, int] | None = None
    source_slice: tuple[int, int] | None = None
    is_shared: bool = False


def rank_sources(rank: int, num_ranks: int, num_theirs: int, num_heads: int) -> list[RankSource]:
    """Returns the ranks of the producer that have the KV heads of a rank.

    Args:
        rank: The rank of this engine.
        num_ranks: Ranks of this engine.
        num_theirs: Ranks of the producer.
        num_heads: KV heads of the model; 1 if all ranks have the same latent KV; 0 if blocks have no slices by head.

    Raises:
        ConfigError: The heads of a rank are no slice of those of another.
    """
    if num_ranks == num_theirs:
        return [RankSource(rank)]
    if not num_heads or not num_theirs:
        message = (
            f"tensor parallel size is {num_ranks} here and {num_theirs} there: blocks here have no slices by head; "
            "start both with the same --tensor-parallel-size"
        )
        raise ConfigError(message)
    ours, theirs = _heads_of_a_rank(num_ranks, num_heads), _heads_of_a_rank(num_theirs, num_heads)
    if not _is_multiple(ours, theirs) or not _is_multiple(num_ranks, num_theirs):
        message = (
            f"tensor parallel size is {num_ranks} here and {num_theirs} there: of {num_heads} KV heads a rank has no "
            "slice of another's; use sizes of which one is a multiple of the other"
        )
        raise ConfigError(message)
    count = max(1, ours // theirs)
    # By the order of the ranks alone, which holds for layers with another number of heads, too.
    ranks = [(rank * count + index) * num_theirs // (num_ranks * count) for index in range(count)]
    if count > 1:
        return [RankSource(each, destination_slice=(index, count)) for index, each in enumerate(ranks)]
    num_slices = theirs // ours
    first = rank * num_heads // num_ranks
    source_slice = None if num_slices == 1 else (first % theirs // ours, num_slices)
    return [RankSource(ranks[0], source_slice=source_slice, is_shared=num_ranks > num_theirs)]


def _heads_of_a_rank(num_ranks: int, num_heads: int) -> int:
    if not _is_multiple(num_ranks, num_heads):
        message = f"{num_heads} KV heads cannot be divided among {num_ranks} ranks"
        raise ConfigError(message)
    return max(1, num_heads // num_ranks)


def _is_multiple(one: int, other: int) -> bool:
    """True if one of the numbers is a multiple of the other."""
    return max(one, other) % min(one, other) == 0
