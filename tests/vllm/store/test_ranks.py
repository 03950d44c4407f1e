"""Engines of several ranks: each has keys of its own, and what one of them lacks counts for all."""

from typing import Any

import pytest

from kvpipe.vllm.store.metadata import StoreLoadOutcome, WorkerReport
from tests.vllm.store.engine import CHUNK, answered
from tests.vllm.store.test_engine import prompt

pytestmark = pytest.mark.vllm


def test_each_rank_saves_and_loads_its_own_part(new_engine: Any, store: Any) -> None:
    tokens = prompt(3 * CHUNK + 2)
    first = new_engine(num_ranks=2)
    assert first.answer(tokens) == answered(tokens, num_ranks=2)
    first.saved()
    assert len(store.keys) == 6
    second = new_engine(num_ranks=2)
    assert second.answer(tokens) == answered(tokens, num_ranks=2)
    assert second.count("loaded") == 3


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("is_known", [False, True], ids=["when it is loaded", "when it is looked for"])
def test_a_chunk_that_one_rank_lacks_is_computed_by_all(
    new_engine: Any, store: Any, rank: int, *, is_known: bool
) -> None:
    tokens = prompt(3 * CHUNK + 2)
    first = new_engine(num_ranks=2)
    first.answer(tokens)
    first.saved()
    missing = store.lookups[0][3 * rank + 1]
    if is_known:
        store.delete([missing])
    else:
        store.on_select = lambda key: store.delete([missing])
    second = new_engine(num_ranks=2)
    assert second.answer(tokens) == answered(tokens, num_ranks=2)
    assert second.count("loaded") == 1
    second.saved()
    assert missing in store.keys


def test_engines_with_other_numbers_of_ranks_see_nothing_of_each_other(new_engine: Any, store: Any) -> None:
    tokens = prompt(3 * CHUNK)
    first = new_engine(num_ranks=2)
    first.answer(tokens)
    first.saved()
    other = new_engine()
    assert other.answer(tokens) == answered(tokens)
    assert other.count("loaded") == 0


def test_of_two_ranks_reports_the_shorter_load_counts_and_both_properties() -> None:
    ours = WorkerReport({0: [("layout", "a")]}, {"x": StoreLoadOutcome(3), "y": StoreLoadOutcome(1, "missing")})
    theirs = WorkerReport({1: [("layout", "b")]}, {"x": StoreLoadOutcome(2, "corrupt")})
    merged = ours.aggregate(theirs)
    assert merged.properties == {0: [("layout", "a")], 1: [("layout", "b")]}
    assert merged.outcomes == {"x": StoreLoadOutcome(2, "corrupt"), "y": StoreLoadOutcome(1, "missing")}
