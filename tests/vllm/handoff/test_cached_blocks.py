"""Announcements of blocks from a producer's own prefix cache, under vLLM's real scheduler."""

import pytest
from vllm.v1.request import Request

from kvpipe import transfer_params
from kvpipe.vllm.handoff.metadata import ReadyRange
from kvpipe.vllm.handoff.producer import scheduler
from tests.vllm.handoff.engine import BLOCK, STEP_TOKENS, Engine, new_id
from tests.vllm.handoff.test_scheduler import prompt, until

pytestmark = pytest.mark.vllm


def produce(engine: Engine, tokens: list[int]) -> bytes:
    handoff = new_id()
    engine.add(tokens, max_tokens=1, params=transfer_params.produce(handoff))
    return bytes.fromhex(handoff)


def announced(finals: list[ReadyRange], handoff: bytes) -> list[tuple[int, int]]:
    """First position and number of the blocks announced of a handoff."""
    return [(final.first, len(final.block_ids)) for final in finals if final.handoff == handoff]


def test_blocks_of_an_earlier_step_are_announced_before_the_forward_pass(engine: Engine) -> None:
    first = engine.add(prompt(100), max_tokens=1)
    until(lambda: engine.step() and first.is_finished())
    handoff = produce(engine, prompt(100) + prompt(40, seed=2))
    _, metadata = engine.step()
    assert announced(metadata.cached, handoff) == [(0, 3)]
    assert announced(metadata.ready, handoff) == [(3, 2)]


def test_blocks_that_another_request_computes_in_this_step_are_announced_after_it(engine: Engine) -> None:
    engine.add(prompt(100), max_tokens=1)
    handoff = produce(engine, prompt(100))
    output, metadata = engine.step()
    # Both are in one step, and the second has the blocks of the first.
    assert list(output.num_scheduled_tokens.values()) == [100, 4]
    assert announced(metadata.cached, handoff) == []
    assert announced(metadata.ready, handoff) == [(0, 4)]


def test_a_step_is_searched_once_however_many_of_its_requests_share_blocks(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[None] = []
    search = scheduler.written_blocks
    monkeypatch.setattr(scheduler, "written_blocks", lambda *step: (searches.append(None), search(*step))[-1])
    engine.add(prompt(100), max_tokens=1)
    handoffs = [produce(engine, prompt(100)) for _ in range(4)]
    _, metadata = engine.step()
    assert [announced(metadata.ready, handoff) for handoff in handoffs] == [[(0, 4)]] * 4
    assert len(searches) == 1


@pytest.mark.parametrize("is_before", [True, False])
def test_a_block_that_another_request_decodes_into_is_cached_once_that_step_is_over(
    engine: Engine, *, is_before: bool
) -> None:
    tokens = prompt(BLOCK - 1)
    engine.add(tokens, max_tokens=9)
    engine.step()
    if is_before:
        engine.step()  # which computes the sampled token: the last one of the first block
    handoff = produce(engine, [*tokens, 7, *prompt(40, seed=2)])
    output, metadata = engine.step()
    assert output.scheduled_new_reqs[0].num_computed_tokens == BLOCK
    assert announced(metadata.cached, handoff) == ([(0, 1)] if is_before else [])
    assert announced(metadata.ready, handoff) == ([(1, 2)] if is_before else [(0, 3)])


def test_a_block_that_a_step_fills_in_part_is_announced_by_the_step_that_completes_it(engine: Engine) -> None:
    engine.add(prompt(100), max_tokens=1)
    handoff = produce(engine, prompt(300, seed=2))
    output, metadata = engine.step()
    assert list(output.num_scheduled_tokens.values()) == [100, STEP_TOKENS - 100]
    assert announced(metadata.ready, handoff) == [(0, (STEP_TOKENS - 100) // BLOCK)]
    _, metadata = engine.step()
    assert announced(metadata.ready, handoff) == [(4, 6)]


def test_of_shared_blocks_those_before_the_step_are_announced_first(engine: Engine) -> None:
    engine.add(prompt(400), max_tokens=1)
    engine.step()
    handoff = produce(engine, prompt(400))
    output, metadata = engine.step()
    assert next(iter(output.num_scheduled_tokens.values())) == 400 - STEP_TOKENS
    assert announced(metadata.cached, handoff) == [(0, STEP_TOKENS // BLOCK)]
    assert announced(metadata.ready, handoff)[0][0] == STEP_TOKENS // BLOCK


@pytest.fixture
def loaded_elsewhere(engine: Engine) -> set[str]:
    """Requests of which another connector of MultiConnector would load the first three blocks within a step."""
    requests: set[str] = set()
    connector = engine.scheduler.connector
    match = connector.get_num_new_matched_tokens

    def as_if(request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        found = match(request, num_local_tokens)
        return (3 * BLOCK - num_local_tokens, False) if request.request_id in requests else found

    connector.get_num_new_matched_tokens = as_if
    return requests


def test_what_another_connector_loads_within_a_step_is_announced_once_its_request_has_finished(
    engine: Engine, loaded_elsewhere: set[str]
) -> None:
    handoff = produce(engine, prompt(100) + prompt(300, seed=2))
    loaded_elsewhere.add(list(engine.scheduler.requests)[-1])
    for _ in range(2):  # of which the second one computes the last blocks
        _, metadata = engine.step()
        assert announced(metadata.cached + metadata.ready, handoff) == []
    _, metadata = engine.step()
    assert [lease.handoff for lease in metadata.leased] == [handoff]
    assert announced(metadata.cached, handoff) == [(0, 13)]


@pytest.mark.parametrize("is_in_step", [True, False])
def test_another_request_with_blocks_that_a_step_loads_announces_them_when_it_has_finished(
    engine: Engine, loaded_elsewhere: set[str], *, is_in_step: bool
) -> None:
    other = engine.add(prompt(100), max_tokens=9)
    loaded_elsewhere.add(other.request_id)
    if not is_in_step:
        engine.step()
    handoff = produce(engine, prompt(100))
    _, metadata = engine.step()
    assert announced(metadata.cached + metadata.ready, handoff) == []
    _, metadata = engine.step()
    assert announced(metadata.cached, handoff) == [(0, 4)]


def test_a_block_that_could_not_be_loaded_within_a_step_is_announced_once_it_is_computed(
    engine: Engine, loaded_elsewhere: set[str]
) -> None:
    handoff = produce(engine, prompt(100))
    (request,) = engine.scheduler.requests.values()
    loaded_elsewhere.add(request.request_id)
    output = engine.scheduler.schedule()
    second = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0][1]
    engine.end(output, invalid_block_ids={second})
    output, metadata = engine.step()
    assert output.num_scheduled_tokens == {request.request_id: 100 - BLOCK}
    assert announced(metadata.cached + metadata.ready, handoff) == []
    assert metadata.ended == []
    _, metadata = engine.step()
    assert announced(metadata.cached, handoff) == [(0, 4)]


def test_a_finished_request_delays_no_announcement_by_what_it_has_loaded(
    engine: Engine, loaded_elsewhere: set[str]
) -> None:
    other = engine.add(prompt(100), max_tokens=1)
    loaded_elsewhere.add(other.request_id)
    engine.step()
    assert other.is_finished()
    handoff = produce(engine, prompt(100))
    _, metadata = engine.step()
    assert announced(metadata.cached, handoff) == [(0, 3)]
    assert announced(metadata.ready, handoff) == [(3, 1)]
