"""Prefill and decode with different tensor parallel sizes: answers of one instance, both ways."""

from pathlib import Path

import pytest

from tests.e2e.client import Servers
from tests.e2e.groups import Groups
from tests.e2e.test_cache_dtypes import BLOCK, TOKEN_VALUES, body, expected, others, said

TO_ONE = "--tensor-parallel-size 2 | --tensor-parallel-size 1"
# The instances, and what a test spoils: heads change places, or all of a block is wrong.
SIZES = [
    pytest.param((f"roomy {TO_ONE}", "heads"), id="2 and 1"),
    pytest.param(("roomy --tensor-parallel-size 2 | --tensor-parallel-size 2", "heads"), id="2 and 2"),
    pytest.param((f"deepseek-v2 {TO_ONE}", ""), id="2 and 1, latent attention"),
]
# The only block of vLLM's latent attention on CPUs, and its values of a token in 4 layers.
LATENT_BLOCK = 16
LATENT_VALUES = 4 * 576


@pytest.fixture(scope="module", params=SIZES)
def ranks(request: pytest.FixtureRequest, groups: Groups) -> tuple[Servers, str]:
    """Instances of these sizes, and what is spoilt."""
    name, order = request.param
    return groups.show(name), order


@pytest.mark.parametrize("is_reversed", [False, True], ids=["to decode", "to prefill"])
def test_answers_between_unequal_tensor_parallel_sizes_are_those_of_one_instance(
    ranks: tuple[Servers, str], *, is_reversed: bool
) -> None:
    servers, order = ranks
    if order:
        assert not others(servers, 4 * TOKEN_VALUES, is_reversed=is_reversed)
    else:  # each of prefill's ranks loads all of it
        token_bytes = 4 * LATENT_VALUES * (2 if is_reversed else 1)
        assert not others(servers, token_bytes, is_reversed=is_reversed, block=LATENT_BLOCK)
    servers.come_to_rest()


def test_wrong_kv_changes_the_answer(ranks: tuple[Servers, str], flip: Path) -> None:
    servers, order = ranks
    wanted = body(3 * BLOCK + 10, seed=20)
    flip.write_text(order)
    found, result = said(servers, servers.url, wanted)
    flip.unlink()
    assert (result["result"], result["checksums_differed"]) == ("full", 0)
    assert found != expected(servers, wanted)
