"""A load ends as soon as the scheduler role knows both parts of it: blocks on all ranks, and the sequence state."""

from typing import TYPE_CHECKING, Any

import pytest

from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import consume
from kvpipe.vllm.handoff.consumer.consumed import Consumed
from kvpipe.vllm.handoff.metadata import Cancel, StepMetadata, WorkerOutcomes
from kvpipe.vllm.prompt_hash import prompt_hash
from tests.vllm.handoff.engine import NUM_BLOCKS, SAMPLING, Engine, new_id, outcome
from tests.vllm.handoff.wire import Wire

if TYPE_CHECKING:
    from vllm.v1.request import Request

pytestmark = pytest.mark.vllm

TOKENS = list(range(10, 110))


class Scene:
    """A request that is being loaded; what is said elsewhere is in the test's hands."""

    def __init__(self, engine: Engine, num_ranks: int = 1) -> None:
        engine.role._out.control.close()
        self.engine, self.wire = engine, Wire()
        engine.role._out.control = self.wire
        engine.role._consuming._num_ranks = num_ranks
        handoff = new_id()
        self.handoff = bytes.fromhex(handoff)
        self.request: Request = engine.add(TOKENS, params=consume(handoff, "127.0.0.1:1"))
        self.wire.send_opened(self.handoff, prompt_hash(self.request), len(TOKENS))
        assert self.step()[1].loads

    def step(self, **worker: Any) -> tuple[int, StepMetadata]:
        """A step: the tokens of the request that it computes, and what the workers were told."""
        output = self.engine.scheduler.schedule()
        self.end(output, **worker)
        return output.num_scheduled_tokens.get(self.request.request_id, 0), output.kv_connector_metadata

    def end(self, output: Any, **worker: Any) -> None:
        """The second half of a step, in which workers answer what they were told."""
        words = worker.setdefault("kv_connector_worker_meta", WorkerOutcomes())
        words.acknowledged = output.kv_connector_metadata.committed
        self.engine.end(output, **worker)

    def blocks_verified(self, num_ranks: int = 1) -> tuple[int, StepMetadata]:
        """A step in which so many ranks say that they have all blocks."""
        facts = outcome(self.request, num_received=4).outcomes[self.request.request_id]
        verified = WorkerOutcomes(verified={self.request.request_id: [facts] * num_ranks})
        return self.step(kv_connector_worker_meta=verified)

    def broken(self) -> WorkerOutcomes:
        """The report of a rank that has lost blocks that it had verified."""
        return WorkerOutcomes(broken={self.request.request_id})

    def send_finished(self) -> None:
        self.wire.send_finished(self.handoff, [7], SAMPLING.hash(self.request))


@pytest.fixture
def scene(engine: Engine) -> Scene:
    return Scene(engine)


def test_a_state_that_comes_during_a_step_has_the_next_one_compute(scene: Scene) -> None:
    scene.blocks_verified()
    output = scene.engine.scheduler.schedule()
    scene.send_finished()
    scene.end(output)
    num_tokens, metadata = scene.step()
    assert (num_tokens, metadata.committed, metadata.states) == (1, [scene.handoff], [])
    assert metadata.first_tokens == {scene.handoff: 7}


def test_a_state_that_comes_between_steps_has_the_step_after_the_next_compute(scene: Scene) -> None:
    scene.blocks_verified()
    scene.send_finished()
    assert scene.step()[1].committed == [scene.handoff]
    assert scene.step()[0] == 1
    assert scene.wire.watched[scene.handoff].is_over


def test_a_commit_is_acknowledged_to_the_producer_if_its_request_was_aborted_meanwhile(scene: Scene) -> None:
    scene.blocks_verified()
    output = scene.engine.scheduler.schedule()
    scene.send_finished()
    scene.end(output)
    scene.engine.abort(scene.request)
    scene.step()
    assert scene.wire.watched[scene.handoff].is_acknowledged


def test_a_handoff_whose_commit_the_workers_do_not_know_of_belongs_to_its_request_still(scene: Scene) -> None:
    scene.blocks_verified()
    output = scene.engine.scheduler.schedule()
    scene.send_finished()
    scene.end(output)
    scene.engine.abort(scene.request)
    with pytest.raises(ConfigError, match=f"belongs to request {scene.request.request_id}"):
        scene.engine.role._consuming.add(scene.request, Consumed(scene.handoff, "127.0.0.1:1", 4, scene.request))
    scene.step()
    assert scene.wire.watched[scene.handoff].is_acknowledged


def test_nothing_is_committed_before_the_last_rank_has_all_blocks(engine: Engine) -> None:
    scene = Scene(engine, num_ranks=2)
    scene.blocks_verified(1)
    scene.send_finished()
    num_tokens, metadata = scene.step()
    assert (num_tokens, metadata.committed, metadata.states) == (0, [], [scene.handoff])
    assert scene.blocks_verified(1)[0] == 0
    assert scene.step()[0] == 0, "the workers end it, for they were told of the state"
    done = outcome(scene.request)
    scene.step(finished_recving={scene.request.request_id}, kv_connector_worker_meta=done)
    assert scene.step()[0] == 1


def test_ranks_that_have_all_blocks_in_one_step_count_together(engine: Engine) -> None:
    scene = Scene(engine, num_ranks=2)
    facts = WorkerOutcomes(
        verified={scene.request.request_id: [outcome(scene.request).outcomes[scene.request.request_id]]}
    )
    scene.step(kv_connector_worker_meta=facts.aggregate(facts))
    scene.send_finished()
    scene.step()
    assert scene.step()[0] == 1


def test_nothing_is_committed_without_the_sequence_state(scene: Scene) -> None:
    scene.blocks_verified()
    for _ in range(5):
        num_tokens, metadata = scene.step()
        assert (num_tokens, metadata.committed) == (0, [])


def test_a_handoff_that_has_ended_is_cancelled_and_not_committed(scene: Scene) -> None:
    scene.blocks_verified()
    scene.wire.send_ended(scene.handoff)
    num_tokens, metadata = scene.step()
    assert (num_tokens, metadata.committed) == (0, [])
    assert metadata.cancels[0].handoff == scene.handoff


@pytest.mark.parametrize("is_withdrawn", [True, False])
def test_the_workers_learn_whether_the_producer_has_withdrawn_its_blocks(scene: Scene, *, is_withdrawn: bool) -> None:
    scene.blocks_verified()
    scene.wire.send_ended(scene.handoff, is_withdrawn=is_withdrawn)
    assert scene.step()[1].cancels == [Cancel(scene.handoff, "it has ended", is_withdrawn)]


def test_a_rank_that_fails_after_it_had_all_blocks_is_not_committed(engine: Engine) -> None:
    scene = Scene(engine, num_ranks=2)
    scene.blocks_verified(2)
    scene.step(kv_connector_worker_meta=scene.broken())
    scene.send_finished()
    num_tokens, metadata = scene.step()
    assert (num_tokens, metadata.committed, metadata.states) == (0, [], [scene.handoff])


def test_a_rank_whose_blocks_are_lost_after_it_had_them_ends_the_load_when_no_commit_can_come(engine: Engine) -> None:
    scene = Scene(engine, num_ranks=2)
    scene.blocks_verified(1)
    scene.step(kv_connector_worker_meta=scene.broken())
    (cancel,) = scene.step()[1].cancels
    assert (cancel.handoff, cancel.is_withdrawn) == (scene.handoff, False)


def test_a_withdrawal_is_all_that_the_workers_hear_of_a_load_that_is_cancelled_twice_in_a_step(engine: Engine) -> None:
    scene = Scene(engine, num_ranks=2)
    scene.blocks_verified(1)
    output = scene.engine.scheduler.schedule()
    scene.wire.send_ended(scene.handoff, is_withdrawn=True)
    scene.end(output, kv_connector_worker_meta=scene.broken())
    assert scene.step()[1].cancels == [Cancel(scene.handoff, "it has ended", is_withdrawn=True)]


def test_a_rank_that_is_broken_after_the_commit_changes_nothing(scene: Scene) -> None:
    scene.blocks_verified()
    output = scene.engine.scheduler.schedule()
    scene.send_finished()
    scene.end(output)
    output = scene.engine.scheduler.schedule()
    assert (output.num_scheduled_tokens, output.kv_connector_metadata.committed) == (
        {scene.request.request_id: 1},
        [scene.handoff],
    )
    scene.end(output, kv_connector_worker_meta=scene.broken())
    assert scene.step()[1].cancels == []
    assert scene.request.num_output_tokens == 2


def test_a_rank_that_has_failed_no_longer_counts_as_verified(engine: Engine) -> None:
    scene = Scene(engine, num_ranks=2)
    scene.step(kv_connector_worker_meta=outcome(scene.request, is_loaded=False))
    scene.blocks_verified(2)
    scene.send_finished()
    assert scene.step()[1].committed == []


@pytest.mark.parametrize("is_verified_before", [True, False])
def test_an_aborted_request_is_not_committed(scene: Scene, *, is_verified_before: bool) -> None:
    if is_verified_before:
        scene.blocks_verified()
    scene.engine.abort(scene.request)
    if not is_verified_before:
        scene.blocks_verified()
    scene.send_finished()
    assert scene.step()[1].committed == []


def test_the_result_of_a_committed_load_counts_its_blocks(scene: Scene) -> None:
    scene.blocks_verified()
    scene.send_finished()
    while not scene.request.is_finished():
        scene.step()
    (result,) = scene.wire.results[scene.handoff]
    assert '"result": "full"' in result
    assert '"blocks_received": 4' in result


def test_an_abort_after_the_commit_gives_the_blocks_back_once(scene: Scene) -> None:
    scene.blocks_verified()
    output = scene.engine.scheduler.schedule()
    scene.send_finished()
    scene.engine.role._drain_events()
    scene.engine.abort(scene.request)
    scene.end(output)
    assert scene.engine.num_free_blocks == NUM_BLOCKS - 1
    scene.step()
    assert not scene.engine.scheduler.requests
    assert len(scene.wire.results[scene.handoff]) == 1


def test_a_handoff_is_acknowledged_when_the_workers_know_and_not_before(scene: Scene) -> None:
    scene.blocks_verified()
    output = scene.engine.scheduler.schedule()
    scene.send_finished()
    scene.end(output)
    output = scene.engine.scheduler.schedule()
    assert output.num_scheduled_tokens
    assert not scene.wire.watched[scene.handoff].is_over, "it would end the load that the workers still have"
    scene.end(output)
    assert scene.wire.watched[scene.handoff].is_acknowledged


def test_a_second_end_of_a_committed_load_never_reaches_vllm(scene: Scene) -> None:
    scene.blocks_verified()
    output = scene.engine.scheduler.schedule()
    scene.send_finished()
    scene.end(output)
    output = scene.engine.scheduler.schedule()
    failed = outcome(scene.request, is_loaded=False)
    scene.engine.end(output, finished_recving={scene.request.request_id}, kv_connector_worker_meta=failed)
    assert scene.request.num_output_tokens == 1
    (result,) = scene.wire.results[scene.handoff]
    assert '"result": "full"' in result


def test_a_load_that_fails_in_the_step_in_which_its_state_comes_is_not_committed(scene: Scene) -> None:
    scene.blocks_verified()
    output = scene.engine.scheduler.schedule()
    scene.send_finished()
    scene.end(output, kv_connector_worker_meta=scene.broken())
    assert scene.step()[1].committed == []


def test_the_notice_of_a_refusal_leaves_a_handoff_alone_whose_commit_the_workers_do_not_know_of(scene: Scene) -> None:
    scene.blocks_verified()
    output = scene.engine.scheduler.schedule()
    scene.send_finished()
    scene.end(output)
    scene.engine.abort(scene.request)
    assert len(scene.engine.role._consuming) == 0
    notice = consume(scene.handoff.hex(), "127.0.0.1:1")
    scene.engine.add([0], max_tokens=1, params=notice, abort_immediately=True)
    assert not scene.wire.watched[scene.handoff].is_over
