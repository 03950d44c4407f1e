"""Which of a producer's ranks have the KV of a rank of this engine, where their numbers differ.

Tensor parallelism gives each rank some KV heads, in their order. With more ranks than heads, neighbours have the same
one. The heads of a block are one behind the other in its memory, so that some of them are a slice of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvpipe.exceptions import ConfigError


@dataclass(frozen=True)
class RankSource:
    """A rank of the producer from which a rank of this engine loads.

    Attributes:
        rank: The producer's rank.
        slice_here: `(index, count)`: which slice of the blocks here it fills, and of how many; `None` for all of them.
        slice_there: Which slice of its blocks that is, and of how many; `None` for all of them.
        is_shared: True if other ranks here load from it, too.
    """

    rank: int
    slice_here: tuple[int, int] | None = None
    slice_there: tuple[int, int] | None = None
    is_shared: bool = False


def rank_sources(rank: int, num_ranks: int, num_theirs: int, num_heads: int) -> list[RankSource]:
    """Returns the ranks of the producer that have the KV heads of a rank.

    Args:
        rank: The rank of this engine.
        num_ranks: Ranks of this engine.
        num_theirs: Ranks of the producer.
        num_heads: KV heads of the model; 1 if all ranks have the same latent KV; 0 if they cannot be told apart.

    Raises:
        ConfigError: The heads of a rank are no slice of those of another.
    """
    sources = [_of_rank(each, num_ranks, num_theirs, num_heads) for each in range(num_ranks)]
    used = [source.rank for of_rank in sources for source in of_rank]
    return [
        RankSource(source.rank, source.slice_here, source.slice_there, used.count(source.rank) > 1)
        for source in sources[rank]
    ]


def _of_rank(rank: int, num_ranks: int, num_theirs: int, num_heads: int) -> list[RankSource]:
    if num_ranks == num_theirs:
        return [RankSource(rank)]
    if not num_heads:
        message = f"tensor parallel size is {num_ranks} here and {num_theirs} there: blocks here have no slices by head"
        raise ConfigError(message)
    first, ours = _heads(rank, num_ranks, num_heads)
    _, theirs = _heads(0, num_theirs, num_heads)
    if max(ours, theirs) % min(ours, theirs) or max(num_ranks, num_theirs) % min(num_ranks, num_theirs):
        raise ConfigError(_no_slices(num_ranks, num_theirs, num_heads))
    # Ranks of both engines follow the order of heads: each of these has its head in a layer with more of them, too.
    count = max(1, ours // theirs)
    holders = [(rank * count + index) * num_theirs // (num_ranks * count) for index in range(count)]
    if count > 1:
        return [RankSource(holder, slice_here=(index, count)) for index, holder in enumerate(holders)]
    num_there = theirs // ours
    there = None if num_there == 1 else (first % theirs // ours, num_there)
    return [RankSource(holders[0], slice_there=there)]


def _heads(rank: int, num_ranks: int, num_heads: int) -> tuple[int, int]:
    """The first head of a rank, and their number."""
    larger, smaller = max(num_ranks, num_heads), min(num_ranks, num_heads)
    if larger % smaller:
        message = f"{num_heads} KV heads cannot be divided among {num_ranks} ranks"
        raise ConfigError(message)
    return rank * num_heads // num_ranks, max(1, num_heads // num_ranks)


def _no_slices(num_ranks: int, num_theirs: int, num_heads: int) -> str:
    return (
        f"tensor parallel size is {num_ranks} here and {num_theirs} there: of {num_heads} KV heads a rank has no slice "
        "of another's; use sizes of which one is a multiple of the other"
    )
