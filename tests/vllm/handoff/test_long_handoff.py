"""A long prompt of a deep model, handed over between engines of different tensor parallel sizes.

vLLM's schedulers, both roles and the agents of all ranks are real, in this process. No model runs: the KV is there.
"""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpipe import _kvpipe
from kvpipe.transfer_params import consume, produce
from kvpipe.vllm.handoff.metadata import HandshakeMetadata, StepMetadata
from kvpipe.vllm.handoff.worker import WorkerRole
from tests.vllm.handoff.engine import SHAPE, Engine, engine_config, new_id, outcome
from tests.vllm.handoff.ranks import CacheShape, EngineOfRanks
from tests.vllm.handoff.test_scheduler import consuming, opened, prompt, reported, until

pytestmark = pytest.mark.vllm

NUM_TOKENS, STEP_TOKENS, BLOCK = 131_072, 8_192, 16
NUM_PROMPT_BLOCKS = NUM_TOKENS // BLOCK
# A block has 16 bytes for each head. 5 million of these are moved.
CACHE = CacheShape(num_layers=80, num_blocks=NUM_PROMPT_BLOCKS + 8, num_heads=8, block_size=BLOCK, content=1)
WITHIN_S = 120


def engine_of(model: str, workers: Sequence[HandshakeMetadata]) -> Engine:
    """An engine for long prompts, with a rank for each of its workers."""
    arguments = {"max_model_len": NUM_TOKENS + BLOCK, "block_size": BLOCK, "max_num_batched_tokens": STEP_TOKENS}
    shape = {"max_position_embeddings": 2 * NUM_TOKENS, "num_key_value_heads": CACHE.num_heads}
    config = engine_config(model, {**arguments, "hf_overrides": shape})
    config.parallel_config.world_size = config.parallel_config.tensor_parallel_size = len(workers)
    of_rank = {"block_size": BLOCK, "num_kv_heads": CACHE.num_heads // len(workers)}
    return Engine(config, CACHE.num_blocks, [FullAttentionSpec(**SHAPE | of_rank)], BLOCK, workers)


class Instance:
    """An engine with a worker for each rank.

    Attributes:
        steps: Metadata of all steps.
    """

    def __init__(self, model: str, num_ranks: int, *, seed: int) -> None:
        self.ranks = EngineOfRanks(num_ranks, CACHE, seed=seed)
        self.engine = engine_of(model, [worker.handshake() for worker in self.ranks.workers])
        self.steps: list[StepMetadata] = []
        self._aggregator = KVOutputAggregator(num_ranks)

    def step(self) -> None:
        """One step of the scheduler and of all workers."""
        output = self.engine.scheduler.schedule()
        self.steps.append(output.kv_connector_metadata)
        pickled = pickle.dumps(output.kv_connector_metadata)
        reports = [self._work(worker, pickle.loads(pickled)) for worker in self.ranks.workers]
        result = self._aggregator.aggregate([self.engine.run(output, **report) for report in reports])
        self.engine.deliver(self.engine.scheduler.update_from_output(output, result))

    def _work(self, worker: WorkerRole, step: StepMetadata) -> dict[str, Any]:
        worker.prepare_step(step)
        worker.begin_step(step)
        for layer in CACHE.layers:
            worker.save_layer(layer)
        worker.end_forward()
        sent, received = worker.finished()
        return {
            "finished_sending": sent,
            "finished_recving": received,
            "invalid_block_ids": worker.drain_invalid_block_ids(),
            "kv_connector_worker_meta": worker.drain_outcomes(),
        }

    @property
    def has_all_free(self) -> bool:
        """True if no request holds a block; one is vLLM's null block."""
        return self.engine.num_free_blocks == CACHE.num_blocks - 1

    def close(self) -> None:
        """Ends both roles."""
        self.engine.close()
        self.ranks.close()


@pytest.fixture
def new_instance(tiny_model: str) -> Iterator[Callable[..., Instance]]:
    instances: list[Instance] = []

    def make(num_ranks: int, seed: int) -> Instance:
        instances.append(Instance(tiny_model, num_ranks, seed=seed))
        return instances[-1]

    yield make
    for instance in reversed(instances):
        instance.close()


def step_until(is_so: Callable[[], bool], *instances: Instance) -> None:
    """Steps of the instances in turn, until something is so."""
    ends_at = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < ends_at, f"not within {WITHIN_S} s"
        for instance in instances:
            instance.step()


def announced(steps: Sequence[StepMetadata]) -> list[int]:
    """The blocks that a producer announces, by position."""
    ranges = [each for step in steps for each in (*step.cached, *step.ready)]
    block_ids = {each.first + index: block_id for each in ranges for index, block_id in enumerate(each.block_ids)}
    assert sum(len(each.block_ids) for each in ranges) == len(block_ids) == NUM_PROMPT_BLOCKS, "each is announced once"
    return [block_ids[position] for position in range(NUM_PROMPT_BLOCKS)]


# A decode instance that is asked first gets blocks as they are computed. For one that is asked last all are there, and
# are divided then.
@pytest.mark.parametrize(("theirs", "ours", "is_asked_first"), [(8, 4, True), (4, 8, False)])
def test_a_long_prompt_of_a_deep_model_arrives_on_all_ranks(
    new_instance: Callable[..., Instance],
    log: pytest.LogCaptureFixture,
    theirs: int,
    ours: int,
    *,
    is_asked_first: bool,
) -> None:
    producer, consumer = new_instance(theirs, seed=1), new_instance(ours, seed=2)
    # So that blocks have other ids there.
    step_until(consumer.engine.add(prompt(2 * BLOCK, seed=3), 1).is_finished, consumer)
    handoff, tokens = new_id(), prompt(NUM_TOKENS)
    prefill = producer.engine.new_request(tokens, 1, produce(handoff))
    decode = consumer.engine.new_request(tokens, 3, consume(handoff, producer.engine.role.address))
    if is_asked_first:
        consumer.engine.scheduler.add_request(decode)
    producer.engine.scheduler.add_request(prefill)
    step_until(prefill.is_finished, *([consumer, producer] if is_asked_first else [producer]))
    if not is_asked_first:
        consumer.engine.scheduler.add_request(decode)
    step_until(decode.is_finished, producer, consumer)
    step_until(lambda: producer.has_all_free and consumer.has_all_free, producer, consumer)

    result = reported(consumer.engine, handoff)
    assert (result["result"], result["recomputed_tokens"]) == ("full", 0)
    assert (result["blocks_received"], result["blocks_missing"]) == (NUM_PROMPT_BLOCKS, 0)
    assert result["checksums_compared"] == max(theirs, ours) * CACHE.num_layers * NUM_PROMPT_BLOCKS
    assert (result["blocks_retried"], result["checksums_differed"], result["reason"]) == (0, 0, "")
    (load,) = (load for step in consumer.steps for load in step.loads)
    theirs_ids = announced(producer.steps)
    assert load.block_ids != theirs_ids
    assert consumer.ranks.has(producer.ranks, load.block_ids, theirs_ids)
    assert (log.text.count("session.open"), log.text.count("session.closed")) == (2 * max(theirs, ours), 0)


@pytest.fixture
def long_engine(tiny_model: str) -> Iterator[Engine]:
    engine = engine_of(tiny_model, [HandshakeMetadata("127.0.0.1:1", bytes(16))])
    yield engine
    engine.close()


def num_blocks_of(step: StepMetadata) -> int:
    parts = [*step.cached, *step.ready, *step.loads]
    return sum(len(part.block_ids) for part in parts)


def is_small(step: StepMetadata) -> bool:
    """True if its pickle has a few bytes for each of its blocks, and little else."""
    return len(pickle.dumps(step)) <= 4 * num_blocks_of(step) + 512


def test_a_step_of_a_long_prefill_tells_workers_of_its_own_blocks_alone(long_engine: Engine) -> None:
    request, steps = long_engine.add(prompt(NUM_TOKENS), 1, produce(new_id())), []
    while not request.is_finished():
        steps.append(long_engine.step()[1])
    assert [num_blocks_of(step) for step in steps] == [STEP_TOKENS // BLOCK] * (NUM_TOKENS // STEP_TOKENS)
    announced(steps)
    assert all(map(is_small, [*steps, long_engine.step()[1]]))


def test_a_load_of_a_long_prompt_is_told_to_workers_once(long_engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(long_engine, producer, prompt(NUM_TOKENS))
    opened(producer, request, handoff)
    steps: list[StepMetadata] = []
    until(lambda: steps.append(long_engine.step()[1]) or steps[-1].loads)
    ended = {"finished_recving": {request.request_id}, "kv_connector_worker_meta": outcome(request)}
    steps.append(long_engine.step(**ended)[1])
    while not request.is_finished():
        steps.append(long_engine.step()[1])
    assert sum(map(num_blocks_of, steps)) == NUM_PROMPT_BLOCKS
    assert all(map(is_small, steps))
