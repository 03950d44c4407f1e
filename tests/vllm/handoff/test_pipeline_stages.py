"""Handoffs from an engine with pipeline parallelism: each layer is read from the stage that has it."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvpipe import _kvpipe
from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import produce
from kvpipe.vllm.handoff.consumer.pipeline_stages import pipeline_stages
from kvpipe.vllm.handoff.metadata import HandoffEnd, HandoffLease, HandshakeMetadata, Load, ReadyRange, StepMetadata
from kvpipe.vllm.handoff.scheduler import SchedulerRole
from kvpipe.vllm.prompt_hash import prompt_hash
from tests.vllm.handoff.engine import SHAPE as SPEC
from tests.vllm.handoff.engine import Engine, new_id
from tests.vllm.handoff.ranks import CacheShape, EngineOfRanks
from tests.vllm.handoff.test_cache_groups import groups
from tests.vllm.handoff.test_scheduler import consuming, prompt, reported, until
from tests.vllm.handoff.test_worker import received, role

pytestmark = pytest.mark.vllm


@dataclass(frozen=True)
class StageShape(CacheShape):
    """The KV cache of a stage.

    Attributes:
        first_layer: Index of its first layer in the model.
    """

    first_layer: int = 0

    @property
    def layers(self) -> list[str]:
        return [f"layer.{self.first_layer + index}" for index in range(self.num_layers)]


class Pipeline:
    """A producer of two stages, of one layer and of two, and a consumer with all three."""

    def __init__(self, num_theirs: int, num_ours: int) -> None:
        shapes = [StageShape(num_layers=1), StageShape(num_layers=2, first_layer=1)]
        self.stages = [EngineOfRanks(num_theirs, shape, seed=seed) for seed, shape in enumerate(shapes)]
        self.consumer = EngineOfRanks(num_ours, CacheShape(num_layers=3), seed=2)
        self.handoff = bytes.fromhex(new_id())

    def load(self, block_ids: list[int]) -> None:
        ranks = [rank for stage in self.stages for rank in stage.ranks]
        load = Load("consuming", self.handoff, [(0, block_ids)], ranks, has_state=True, stages=[[1], [2]])
        self.consumer.step(loads=[load])

    def has(self, ours: list[int], theirs: list[int]) -> bool:
        return all(
            torch.equal(cache[first:end, ours], stage.whole[:, theirs][:, :, heads])
            for (first, end), stage in zip([(0, 1), (1, 3)], self.stages, strict=True)
            for cache, heads in zip(self.consumer.caches, self.consumer.heads, strict=True)
        )

    def close(self) -> None:
        for engine in (self.consumer, *self.stages):
            engine.close()


@contextlib.contextmanager
def pipeline(num_theirs: int, num_ours: int) -> Iterator[Pipeline]:
    made = Pipeline(num_theirs, num_ours)
    yield made
    made.close()


@pytest.mark.parametrize(("theirs", "ours"), [(1, 1), (2, 2), (1, 2), (2, 1), (4, 2)])
def test_each_layer_is_read_from_its_stage(theirs: int, ours: int) -> None:
    with pipeline(theirs, ours) as made:
        made.load([1, 6, 2])
        for stage in made.stages:
            stage.announce(made.handoff, [3, 5, 7])
        for worker in made.consumer.workers:
            assert received(worker) == {"consuming"}
            outcome = worker.drain_outcomes().outcomes["consuming"]
            assert (outcome.is_loaded, outcome.num_received, outcome.num_missing) == (True, 3, 0)
        assert made.has([1, 6, 2], [3, 5, 7])
        for stage in made.stages:
            stage.step(leased=[HandoffLease(made.handoff, "producing")])
            stage.step(ended=[HandoffEnd(made.handoff, "its consumer acknowledged it")])
            for worker in stage.workers:
                until(lambda worker=worker: worker.finished()[0] == {"producing"})


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_dies_ends_the_load_without_its_blocks(stage: int) -> None:
    with pipeline(1, 1) as made:
        made.load([1, 6])
        for each in made.stages:
            each.announce(made.handoff, [3])
        until(lambda: made.has([1], [3]))
        made.stages[stage].close()
        (worker,) = made.consumer.workers
        assert received(worker) == {"consuming"}
        assert worker.drain_invalid_block_ids() == {6}
        outcome = worker.drain_outcomes().outcomes["consuming"]
        assert (outcome.is_loaded, outcome.num_received, outcome.num_missing) == (False, 1, 1)


def test_a_stage_is_asked_for_the_groups_of_which_it_has_layers() -> None:
    names = [["layer.0", "layer.1"], ["layer.2"]]
    stages = [role(groups=[["layer.0"], ["layer.2"]]), role(groups=[["layer.1"], []])]
    consumer = role(groups=names)
    caches = {name: torch.randn(16, 4, 32, 64) for of_group in names for name in of_group}
    theirs = {name: torch.randn(16, 4, 32, 64) for name in caches}
    consumer.register(caches)
    stages[0].register({name: theirs[name] for name in ("layer.0", "layer.2")})
    stages[1].register({"layer.1": theirs["layer.1"]})
    ranks = [(stage.handshake().address, stage.handshake().incarnation) for stage in stages]
    # Without blocks of the first group the second stage has nothing.
    for parts in ([(0, [1, 2]), (1, [4])], [(0, []), (1, [5])]):
        handoff = bytes.fromhex(new_id())
        load = Load("consuming", handoff, parts, ranks, has_state=True, stages=[[1, 1], [1, 0]])
        consumer.begin_step(StepMetadata(loads=[load]))
        ready = [ReadyRange(handoff, 0, [7, 8]), ReadyRange(handoff, 1, [9], 1)]
        for stage in stages:
            stage.begin_step(StepMetadata(ready=ready))
            stage.end_forward()
        assert received(consumer) == {"consuming"}
        assert consumer.drain_failed() == set()
    assert all(torch.equal(caches[name][[1, 2]], theirs[name][[7, 8]]) for name in names[0])
    assert torch.equal(caches["layer.2"][[4, 5]], theirs["layer.2"][[9, 9]])
    for each in (consumer, *stages):
        each.close()


@pytest.mark.parametrize(
    ("stages", "num_workers", "message"),
    [
        ([[1], [1]], 2, "with 2 layers of KV cache group 0, and there are 3 here"),
        ([[1], [3]], 2, "with 4 layers of KV cache group 0, and there are 3 here"),
        ([[1, 0], [2, 0]], 2, "with 2 KV cache groups, and there are 1 here"),
        ([[3], []], 2, "with 0 KV cache groups, and there are 1 here"),
        ([[1], [2]], 3, "and 3 workers"),
    ],
)
def test_stages_with_other_layers_or_ranks_are_refused_by_name(
    stages: Sequence[Sequence[int]], num_workers: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"the producer has 2 pipeline stages {message}; give both engines one model"):
        pipeline_stages(stages, num_workers, [3])


def test_a_producer_that_names_a_worker_twice_is_refused(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    worker = ("127.0.0.1:1", bytes(16))
    producer.open(handoff, prompt_hash(request), 100, [worker, worker], stages=[[1], [2]])
    until(lambda: engine.step() and request.num_output_tokens)
    assert reported(engine, handoff.hex())["reason"].startswith("the producer names a worker for two of its ranks")


def layers_of(*stages: list[str]) -> dict[tuple[int, int], HandshakeMetadata]:
    """What the workers of two ranks and some stages report."""
    return {
        (stage, rank): HandshakeMetadata(f"127.0.0.1:{2 * stage + rank + 1}", bytes(16), layers=[tuple(names)])
        for stage, names in enumerate(stages)
        for rank in range(2)
    }


def test_a_consumer_receives_the_ranks_and_layers_of_each_stage(engine: Engine) -> None:
    engine.scheduler.connector.set_xfer_handshake_metadata_pp_aware(layers_of(["layer.0", "layer.1"], ["layer.2"]))
    handoff = new_id()
    engine.add(prompt(100), max_tokens=1, params=produce(handoff))
    engine.step()
    consumer = _kvpipe.Control(None, b"", "consumer")
    consumer.watch(bytes.fromhex(handoff), engine.role.address)
    (opened,) = until(lambda: [event for event in consumer.drain() if event["event"] == "opened"])
    consumer.close()
    assert [address for address, _ in opened["ranks"]] == [f"127.0.0.1:{port}" for port in (1, 2, 3, 4)]
    assert opened["stages"] == [[2], [1]]


def test_the_layers_of_all_stages_are_compared(config: object, engine: Engine) -> None:
    first = groups(FullAttentionSpec(**SPEC))
    found = []
    for workers in (layers_of(["layer.0", "layer.1"], ["layer.2"]), layers_of(["layer.0"], ["layer.1"])):
        scheduler = SchedulerRole(config, engine.role._config, first)
        scheduler.set_workers(workers)
        found.append(dict(scheduler._fingerprint)["kv cache groups"])
        scheduler.close()
    assert found[0] == dict(engine.role._fingerprint)["kv cache groups"] != found[1]


def test_a_load_of_which_no_stage_has_a_block_ends_at_once() -> None:
    worker = role(groups=[["layer.0"]])
    worker.register({"layer.0": torch.randn(16, 4, 32, 64)})
    load = Load("consuming", bytes.fromhex(new_id()), [(0, [])], [("127.0.0.1:1", bytes(16))], has_state=True)
    worker.begin_step(StepMetadata(loads=[load]))
    assert worker.finished() == (set(), {"consuming"})
    outcome = worker.drain_outcomes().outcomes["consuming"]
    assert (outcome.is_loaded, outcome.reason) == (False, "no block of it is wanted")
    worker.close()


def test_the_first_rank_of_the_last_stage_predicts_the_end_of_a_prefill() -> None:
    workers = [role(groups=[["layer.0"]], rank=rank, num_ranks=2, num_stages=2) for rank in range(4)]
    assert [worker._progress._is_silent for worker in workers] == [True, True, False, True]
    for worker in workers:
        worker.close()
