"""Ranks of a producer with another tensor parallel size: each rank gets its heads, once, from one that has them."""

import itertools

import pytest

from kvpipe.exceptions import ConfigError
from kvpipe.vllm.handoff.consumer.rank_sources import RankSource, rank_sources

SIZES = (1, 2, 4, 8)


def heads_of(rank: int, num_ranks: int, num_heads: int) -> list[int]:
    """As vLLM divides them (`QKVParallelLinear`): in order, and repeated where there are more ranks."""
    if num_ranks >= num_heads:
        return [rank // (num_ranks // num_heads)]
    each = num_heads // num_ranks
    return list(range(rank * each, (rank + 1) * each))


def slice_of(items: list[int], part: tuple[int, int] | None) -> list[int]:
    index, count = part or (0, 1)
    assert len(items) % count == 0
    size = len(items) // count
    return items[index * size : (index + 1) * size]


@pytest.mark.parametrize("num_heads", [1, 2, 8])
@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(SIZES, SIZES)))
def test_a_rank_gets_its_heads_in_their_order(ours: int, theirs: int, num_heads: int) -> None:
    for rank in range(ours):
        sources = rank_sources(rank, ours, theirs, num_heads)
        wanted = heads_of(rank, ours, num_heads)
        for source in sources:
            there = slice_of(heads_of(source.rank, theirs, num_heads), source.source_slice)
            assert slice_of(wanted, source.destination_slice) == there
        filled = [slice_of(wanted, source.destination_slice) for source in sources]
        assert list(itertools.chain(*filled)) == wanted, "each slice is filled once"


@pytest.mark.parametrize(("ours", "theirs"), list(itertools.product(SIZES, SIZES)))
def test_a_source_is_shared_if_other_ranks_load_from_it(ours: int, theirs: int) -> None:
    for num_heads in (1, 2, 8):
        by_rank = [rank_sources(rank, ours, theirs, num_heads) for rank in range(ours)]
        used = [source.rank for of_rank in by_rank for source in of_rank]
        for source in itertools.chain(*by_rank):
            assert source.is_shared == (used.count(source.rank) > 1)


def test_ranks_that_have_the_same_head_are_loaded_from_in_turn() -> None:
    found = [rank_sources(rank, 2, 8, 1) for rank in range(2)]
    assert found == [[RankSource(0)], [RankSource(4)]]


@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize(("ours", "theirs"), [(8, 16), (16, 8), (8, 32), (32, 8)])
def test_ranks_with_one_head_a_layer_have_it_in_layers_with_more_heads_too(
    ours: int, theirs: int, num_heads: int
) -> None:
    """vLLM names one number of KV heads for a model; MiMo's layers with windows have twice as many."""
    for rank in range(ours):
        (source,) = rank_sources(rank, ours, theirs, num_heads)
        for in_layer in (1, 2, 4, 8):
            assert heads_of(source.rank, theirs, in_layer) == heads_of(rank, ours, in_layer)


@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (3, 2)])
def test_sizes_without_slices_are_refused_with_both(ours: int, theirs: int) -> None:
    with pytest.raises(ConfigError, match=f"size is {ours} here and {theirs} there: of 6 KV heads"):
        rank_sources(0, ours, theirs, 6)
    with pytest.raises(ConfigError, match="8 KV heads cannot be divided among 3 ranks"):
        rank_sources(0, 2, 3, 8)
    with pytest.raises(ConfigError, match="size is 2 here and 1 there: blocks here have no slices"):
        rank_sources(0, 2, 1, 0)
