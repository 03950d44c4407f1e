"""Two engines that produce and consume, and whose blocks are all leased to each other."""

import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from vllm.v1.request import Request, RequestStatus

from kvpipe.transfer_params import consume, produce
from kvpipe.vllm.handoff.consumer import deadlock
from kvpipe.vllm.handoff.consumer.consumed import LossReason
from kvpipe.vllm.handoff.consumer.deadlock import DeadlockTimer
from kvpipe.vllm.handoff.consumer.scheduler import _producer_of
from kvpipe.vllm.handoff.consumer.state_machine import Phase
from kvpipe.vllm.handoff.metadata import HandshakeMetadata, WorkerOutcomes
from tests.vllm.handoff.engine import BLOCK, Engine, engine_config, new_id, outcome
from tests.vllm.handoff.test_worker import until

pytestmark = pytest.mark.vllm

NUM_FREE = 4
LENGTH = NUM_FREE * BLOCK


class Side:
    """An engine whose workers load at once, and free leased blocks as soon as their handoff has ended."""

    def __init__(self, model: str, incarnation: int, on_load_failure: str) -> None:
        self.engine = Engine(engine_config(model, on_load_failure=on_load_failure), num_blocks=1 + NUM_FREE)
        workers = {(0, 0): HandshakeMetadata("127.0.0.1:1", bytes([incarnation] * 16), forces_first_tokens=True)}
        self.engine.role.set_workers(workers)
        self.computed: Counter[str] = Counter()
        self.are_loads_held = False
        self._leased: dict[bytes, str] = {}

    def step(self) -> None:
        output = self.engine.scheduler.schedule()
        self.computed.update(output.num_scheduled_tokens)
        metadata = output.kv_connector_metadata
        self._leased |= {lease.handoff: lease.request_id for lease in metadata.leased}
        ended = {end.handoff for end in metadata.ended} & self._leased.keys()
        report = WorkerOutcomes()
        for load in () if self.are_loads_held else metadata.loads:
            assert load.has_state, "the producer has finished long ago"
            report = report.aggregate(outcome(load))
        self.engine.end(
            output,
            finished_sending={self._leased.pop(handoff) for handoff in ended},
            finished_recving=set(report.outcomes),
            kv_connector_worker_meta=report,
        )

    def produce(self, token: int, num_blocks: int = NUM_FREE) -> str:
        """Leases blocks of this engine."""
        handoff, num_free = new_id(), self.engine.num_free_blocks
        request = self.engine.add([token] * num_blocks * BLOCK, 1, produce(handoff))
        while not request.is_finished():
            self.step()
        self.step()
        assert self.engine.num_free_blocks == num_free - num_blocks
        return handoff

    def consume(self, token: int, handoff: str, producer: "Side", num_blocks: int = NUM_FREE) -> Request:
        return self.engine.add([token] * num_blocks * BLOCK, 1, consume(handoff, producer.engine.role.address))

    def gives_way(self, request: Request) -> bool:
        """True if the request's load is given up within some steps after its handoff was opened."""
        load = self.engine.role._consuming._consumed.get(request.request_id).load
        until(lambda: self.step() or load.phase is not Phase.WAITING)
        for _ in range(5):
            self.step()
        return load.phase is Phase.LOCAL


@pytest.fixture(params=["recompute"])
def sides(tiny_model: str, request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    both = Side(tiny_model, 1, request.param), Side(tiny_model, 2, request.param)
    yield both
    for side in both:
        side.engine.finish_all()
        side.engine.close()


@pytest.mark.parametrize("sides", ["recompute", "fail"], indirect=True)
def test_of_two_full_engines_that_wait_for_each_other_one_computes_its_prompt_and_the_other_loads(
    sides: tuple[Side, Side],
) -> None:
    first, second = sides
    theirs, ours = first.produce(10), second.produce(20)
    requests = first.consume(20, ours, second), second.consume(10, theirs, first)
    began_s = time.monotonic()
    while not all(request.is_finished() for request in requests):
        first.step()
        second.step()
        assert time.monotonic() < began_s + 30, "they wait for each other"
    assert [request.status for request in requests] == [RequestStatus.FINISHED_LENGTH_CAPPED] * 2
    computed = [side.computed[request.request_id] for side, request in zip(sides, requests, strict=True)]
    assert computed == [LENGTH, 1], "the engine whose incarnation is before the other's gives way, and it alone"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engines give way in the first step in which they may."""
    monkeypatch.setattr(deadlock, "_FIRST_S", 0.0)
    monkeypatch.setattr(deadlock, "_SECOND_S", 0.0)


def test_a_full_engine_gives_way_in_the_first_step_in_which_it_may(sides: tuple[Side, Side], at_once: None) -> None:
    """Proves that the tests below can fail."""
    first, second = sides
    first.produce(10)
    waits = first.consume(20, second.produce(20), second)
    consumed = first.engine.role._consuming._consumed.get(waits.request_id)
    assert first.gives_way(waits)
    assert consumed.loss_reason() is LossReason.GAVE_WAY


def test_an_engine_that_computes_does_not_give_way(sides: tuple[Side, Side], at_once: None) -> None:
    first, second = sides
    first.produce(10, num_blocks=2)
    first.engine.add([30] * (BLOCK + 1), 16)
    first.step()
    assert not first.gives_way(first.consume(20, second.produce(20), second))


def test_an_engine_that_loads_does_not_give_way(sides: tuple[Side, Side], at_once: None) -> None:
    first, second = sides
    first.produce(10, num_blocks=2)
    loads, waits = (first.consume(token, second.produce(token, 2), second, 2) for token in (20, 21))
    first.are_loads_held = True
    assert not first.gives_way(waits)
    assert first.engine.role._consuming._consumed.get(loads.request_id).load.phase is not Phase.LOCAL


def test_an_engine_that_has_leased_nothing_does_not_give_way(sides: tuple[Side, Side], at_once: None) -> None:
    first, second = sides
    first.engine.scheduler.kv_cache_manager.block_pool.get_new_blocks(NUM_FREE)
    assert not first.gives_way(first.consume(20, second.produce(20), second))


def test_time_counts_from_the_first_lease_on() -> None:
    waits = DeadlockTimer()
    waits.note(1, 100.0)
    assert [waits.is_due(b"a", b"b", now_s) for now_s in (100.9, 101.0)] == [False, True]


def test_a_lease_that_ends_or_begins_is_progress() -> None:
    waits = DeadlockTimer()
    for now_s, num_leased_blocks in enumerate((4, 3, 5, 0, 5, 2)):
        waits.note(num_leased_blocks, float(now_s))
        assert not waits.is_due(b"a", b"b", now_s + 0.9)
    waits.note(2, 6.0)
    assert waits.is_due(b"a", b"b", 6.0)


def test_the_engine_that_is_second_waits_until_the_first_one_has_given_way() -> None:
    waits = DeadlockTimer()
    waits.note(4, 0.0)
    assert [waits.is_due(b"b", b"a", now_s) for now_s in (deadlock._FIRST_S, deadlock._SECOND_S)] == [False, True]
    assert not waits.is_due(b"a", b"b", deadlock._SECOND_S + 0.1), "one load at a time is given up"


def test_a_producer_that_names_no_workers_is_not_waited_for_and_ends_no_engine() -> None:
    assert _producer_of(SimpleNamespace(opening={"ranks": []})) == b""
    assert _producer_of(SimpleNamespace(opening=None)) == b""
