"""Prefill with pipeline parallelism: decode reads each layer from the stage that has it."""

from pathlib import Path

import pytest

from tests.e2e.client import Servers
from tests.e2e.groups import Groups
from tests.e2e.test_cache_dtypes import BLOCK, TOKEN_VALUES, body, expected, others, said

STAGES = "stages --pipeline-parallel-size 2 | --pipeline-parallel-size 1"
SIZES = [
    pytest.param(STAGES, id="one rank"),
    pytest.param(f"{STAGES} --tensor-parallel-size 2", id="two ranks"),
]


@pytest.fixture(scope="module", params=SIZES)
def stages(request: pytest.FixtureRequest, groups: Groups) -> Servers:
    """Prefill with two stages, and decode with these ranks."""
    return groups.show(request.param)


def test_answers_after_a_prefill_of_two_stages_are_those_of_one_instance_and_leave_nothing_leased(
    stages: Servers,
) -> None:
    assert not others(stages, 4 * TOKEN_VALUES, is_reversed=False)
    stages.come_to_rest()


def test_a_wrong_block_changes_the_answer(stages: Servers, flip: Path) -> None:
    wanted = body(3 * BLOCK + 10, seed=20)
    flip.touch()
    found, result = said(stages, stages.url, wanted)
    flip.unlink()
    assert (result["result"], result["checksums_differed"]) == ("full", 0)
    assert found != expected(stages, wanted)
