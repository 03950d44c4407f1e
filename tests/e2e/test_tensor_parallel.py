"""Prefill and decode with different tensor parallel sizes: answers of one instance, both ways."""

from pathlib import Path

import pytest

from tests.e2e.client import Servers
from tests.e2e.groups import Groups
from tests.e2e.test_cache_dtypes import BLOCK, body, expected, others, said

SIZES = [
    pytest.param("--tensor-parallel-size 2 | --tensor-parallel-size 1", id="2 and 1"),
    pytest.param("--tensor-parallel-size 2 | --tensor-parallel-size 2", id="2 and 2"),
]


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, groups: Groups) -> Servers:
    """Instances of these sizes."""
    return groups.show(f"roomy {request.param}")


@pytest.mark.parametrize("is_reversed", [False, True], ids=["to decode", "to prefill"])
def test_answers_between_unequal_tensor_parallel_sizes_are_those_of_one_instance(
    ranks: Servers, *, is_reversed: bool
) -> None:
    assert not others(ranks, 4, is_reversed=is_reversed)


def test_wrong_heads_change_the_answer(ranks: Servers, flip: Path) -> None:
    wanted = body(3 * BLOCK + 10, seed=20)
    flip.write_text("heads")
    found, result = said(ranks, ranks.url, wanted)
    flip.unlink()
    assert (result["result"], result["checksums_differed"]) == ("full", 0)
    assert found != expected(ranks, wanted)
