"""Requests that continue after the producer's first token, under vLLM's real scheduler."""

import logging
from collections import deque
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request

from kvpipe import _kvpipe
from kvpipe.transfer_params import consume
from kvpipe.vllm.first_token import continuing_scheduler
from tests.vllm.handoff.engine import BLOCK, Engine, engine_config, new_id
from tests.vllm.handoff.test_first_token_scheduling import forced, loaded, lost
from tests.vllm.handoff.test_scheduler import FREE, consuming, opened, prompt, reported, until

pytestmark = pytest.mark.vllm

CLASS = "kvpipe.connector.ContinuingScheduler"
OWN = 7  # what the test's engine samples
# The producer's token, another one.
OTHER = 9


def continuing_engine(model: str, *, is_async: bool = False, uses_v2: bool = False) -> Engine:
    """An engine with the scheduler that has requests continue, also as vLLM's CPU build has none."""
    config = engine_config(model, {"scheduler_cls": CLASS})
    config.scheduler_config.async_scheduling = is_async
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(uses_v2)))
        return Engine(config)


def ended(engine: Engine) -> Iterator[Engine]:
    """Ends an engine after its test."""
    yield engine
    engine.finish_all()
    engine.close()
    assert_nothing_is_left()


@pytest.fixture
def engine(tiny_model: str) -> Iterator[Engine]:
    """An engine with the scheduler that has requests continue."""
    yield from ended(continuing_engine(tiny_model))


@pytest.fixture(params=[False, True], ids=["V1", "V2"])
def async_engine(tiny_model: str, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The same with asynchronous scheduling, with either model runner."""
    yield from ended(continuing_engine(tiny_model, is_async=True, uses_v2=request.param))


@pytest.fixture
def v2_engine(tiny_model: str) -> Iterator[Engine]:
    """The same with the V2 model runner."""
    yield from ended(continuing_engine(tiny_model, uses_v2=True))


def assert_nothing_is_left() -> None:
    assert all((each.tokens, each.unsent) == ({}, set()) for each in continuing_scheduler._CONTINUED.values())


def asked(
    engine: Engine, producer: _kvpipe.Control, length: int = 100, max_tokens: int = 4, **sampling: Any
) -> tuple[Request, bytes]:
    """A consuming request whose producer has sampled `OTHER`, loaded."""
    handoff = new_id()
    params = consume(handoff, producer.address)
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, "extra_args": {"kv_transfer_params": params}} | sampling
    request = engine.add(prompt(length), max_tokens, params=params, sampling_params=SamplingParams(**sampling))
    load(engine, producer, request, bytes.fromhex(handoff))
    return request, bytes.fromhex(handoff)


def load(engine: Engine, producer: _kvpipe.Control, request: Request, handoff: bytes) -> None:
    opened(producer, request, handoff, token=OTHER)
    loaded(engine, request, handoff)


def next_step(engine: Engine, request: Request) -> SchedulerOutput:
    """Steps until a request is scheduled."""

    def step() -> SchedulerOutput | None:
        output, _ = engine.step()
        return output if request.request_id in output.num_scheduled_tokens else None

    return until(step)


@pytest.mark.parametrize("length", [2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 4, 4 * BLOCK])
def test_one_step_after_a_load_gives_the_client_two_tokens(
    engine: Engine, producer: _kvpipe.Control, length: int
) -> None:
    request, handoff = asked(engine, producer, length)
    output = next_step(engine, request)
    (new,) = output.scheduled_new_reqs
    assert (output.num_scheduled_tokens[request.request_id], new.num_computed_tokens) == (1, length)
    assert new.prompt_token_ids == [*request.prompt_token_ids, OTHER]
    assert output.kv_connector_metadata.first_tokens == {}
    assert output.kv_connector_metadata.first_steps == [handoff]
    assert output.kv_connector_metadata.restores == []
    assert engine.sent[request.request_id] == [OTHER, OWN]
    result = reported(engine, handoff.hex())
    assert (result["result"], result["first_token"], result["computed_tokens"]) == ("full", "exact", 0)
    until(lambda: engine.step() and request.is_finished())
    assert engine.sent[request.request_id] == [OTHER, OWN, OWN, OWN] == list(request.output_token_ids)
    assert engine.num_free_blocks == FREE
    assert_nothing_is_left()


def test_later_steps_tell_workers_of_one_output_token_less(engine: Engine, producer: _kvpipe.Control) -> None:
    request, _ = asked(engine, producer)
    next_step(engine, request)
    cached = next_step(engine, request).scheduled_cached_reqs
    assert (cached.req_ids, cached.num_output_tokens, request.num_output_tokens) == ([request.request_id], [1], 3)


def test_others_in_the_same_steps_are_told_as_they_are(engine: Engine, producer: _kvpipe.Control) -> None:
    other = engine.add(prompt(40, seed=2), max_tokens=60)
    next_step(engine, other)
    request, _ = asked(engine, producer)
    next_step(engine, request)
    output = next_step(engine, request)
    counts = dict(
        zip(output.scheduled_cached_reqs.req_ids, output.scheduled_cached_reqs.num_output_tokens, strict=True)
    )
    assert counts == {request.request_id: 1, other.request_id: other.num_output_tokens - 1}
    assert set(engine.sent[other.request_id]) == {OWN}


class Steps:
    """Steps of an engine, two at once.

    Attributes:
        outputs: Those that compute the request.
    """

    def __init__(self, engine: Engine, request: Request, depth: int = 2) -> None:
        self._engine, self._request, self._depth = engine, request, depth
        self._under_way: deque[SchedulerOutput] = deque()
        self.outputs: list[SchedulerOutput] = []

    def begin(self) -> SchedulerOutput:
        """Schedules a step, and ends the oldest one if it is one too many."""
        if len(self._under_way) == self._depth:
            self._engine.end(self._under_way.popleft())
        output = self._engine.scheduler.schedule()
        self._under_way.append(output)
        if self._request.request_id in output.num_scheduled_tokens:
            self.outputs.append(output)
        return output

    def finish(self) -> None:
        """Goes on until the request has finished and no step is under way."""
        until(lambda: self.begin() and self._request.is_finished())
        while self._under_way:
            self._engine.end(self._under_way.popleft())


@pytest.mark.parametrize("uses_v2", [False, True], ids=["V1", "V2"])
@pytest.mark.parametrize("is_async", [False, True], ids=["one step", "two steps"])
def test_workers_get_the_token_as_their_model_runner_wants_it_one_or_two_steps_deep(
    tiny_model: str, producer: _kvpipe.Control, *, is_async: bool, uses_v2: bool
) -> None:
    for engine in ended(continuing_engine(tiny_model, is_async=is_async, uses_v2=uses_v2)):
        assert isinstance(engine.scheduler, AsyncScheduler) is is_async
        request, handoff = asked(engine, producer)
        steps = Steps(engine, request, depth=1 + is_async)
        steps.finish()
        assert engine.sent[request.request_id] == [OTHER, OWN, OWN, OWN] == list(request.output_token_ids)
        (new,), all_tokens = steps.outputs[0].scheduled_new_reqs, [*prompt(100), OTHER]
        assert new.num_computed_tokens == 100
        assert new.prompt_token_ids == (prompt(100) if uses_v2 else all_tokens)
        if uses_v2:
            assert new.prefill_token_ids[:101] == all_tokens
        else:
            assert [output.scheduled_cached_reqs.num_output_tokens for output in steps.outputs[1:]] == [[1], [2]]
        assert [output.num_scheduled_tokens for output in steps.outputs] == [{request.request_id: 1}] * 3
        assert not any(output.kv_connector_metadata.first_tokens for output in steps.outputs)
        assert reported(engine, handoff.hex())["computed_tokens"] == 0


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_second_token_under_way_while_its_request_is_preempted_is_sent_once(
    async_engine: Engine, producer: _kvpipe.Control, *, is_dropped: bool
) -> None:
    """vLLM delivers it, or computes it again."""
    request, _ = asked(async_engine, producer)
    steps = Steps(async_engine, request)
    until(lambda: steps.begin() and steps.outputs)
    scheduler = async_engine.scheduler
    scheduler._preempt_request(request, 0.0, drop_stale_output=is_dropped)
    scheduler.running.remove(request)
    scheduler.prev_step_scheduled_req_ids.clear()
    steps.finish()
    assert async_engine.sent[request.request_id] == [OTHER, OWN, OWN, OWN] == list(request.output_token_ids)


def test_a_request_that_its_second_token_ends_while_the_third_is_under_way_sends_two(
    async_engine: Engine, producer: _kvpipe.Control
) -> None:
    request, _ = asked(async_engine, producer, stop_token_ids=[OWN])
    steps = Steps(async_engine, request)
    steps.finish()
    assert len(steps.outputs) > 1
    assert async_engine.sent[request.request_id] == [OTHER, OWN]


def test_a_request_that_is_aborted_with_its_second_token_under_way_sends_nothing(
    async_engine: Engine, producer: _kvpipe.Control
) -> None:
    request, _ = asked(async_engine, producer)
    steps = Steps(async_engine, request)
    until(lambda: steps.begin() and steps.outputs)
    async_engine.abort(request)
    steps.finish()
    assert request.request_id not in async_engine.sent
    assert_nothing_is_left()


COUNTS_OUTPUTS = [
    {"seed": 1, "temperature": 1.0},
    {"presence_penalty": 1.0},
    {"frequency_penalty": 1.0},
    {"repetition_penalty": 1.5},
    {"min_tokens": 2},
    {"bad_words": ["x"]},
]


@pytest.mark.parametrize("sampling", COUNTS_OUTPUTS, ids=lambda sampling: next(iter(sampling)))
def test_the_v2_model_runner_tells_the_token_from_the_prompt(v2_engine: Engine, sampling: dict[str, Any]) -> None:
    request = Request("request", prompt(100), SamplingParams(**{"max_tokens": 4, "temperature": 0.0} | sampling), None)
    assert v2_engine.role._continuations.begin(request, OTHER)
    v2_engine.role._continuations.forget(request)


@pytest.mark.parametrize(
    "sampling",
    [
        *COUNTS_OUTPUTS,
        {"logprobs": 1},
        {"prompt_logprobs": 1},
        {"logprob_token_ids": [5]},
        {"thinking_token_budget": 5},
        {"trace_decode_token_ids": [5]},
        {"max_tokens": 1},
        {"stop_token_ids": [OTHER]},
        {"structured_outputs": StructuredOutputsParams(regex="a+")},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_what_depends_on_more_than_the_tokens_takes_two_steps(
    engine: Engine, v2_engine: Engine, sampling: dict[str, Any]
) -> None:
    request = Request("request", prompt(100), SamplingParams(**{"max_tokens": 4, "temperature": 0.0} | sampling), None)
    for each in (engine, v2_engine) if sampling not in COUNTS_OUTPUTS else (engine,):
        assert not each.role._continuations.begin(request, OTHER)
    assert request.num_output_tokens == 0


def test_a_token_with_a_watermark_takes_two_steps(v2_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("request", prompt(100), SamplingParams(max_tokens=4), None)
    continuations = v2_engine.role._continuations
    monkeypatch.setattr(continuations._config, "watermark_config", object(), raising=False)
    assert not continuations.begin(request, OTHER)
    request.sampling_params.watermarking = False
    assert continuations.begin(request, OTHER)
    continuations.forget(request)


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 1, "temperature": 0.0}, {"temperature": 1.2}])
def test_greedy_and_unseeded_requests_continue(engine: Engine, producer: _kvpipe.Control, sampling: Any) -> None:
    request, handoff = asked(engine, producer, **sampling)
    next_step(engine, request)
    assert engine.sent[request.request_id] == [OTHER, OWN]
    assert reported(engine, handoff.hex())["computed_tokens"] == 0


def test_the_last_position_of_the_context_is_left_for_the_second_token(engine: Engine) -> None:
    for length, is_continued in ((2046, True), (2047, False)):
        request = Request("request", prompt(length), SamplingParams(max_tokens=4, ignore_eos=True), None)
        assert engine.role._continuations.begin(request, OTHER) is is_continued
        engine.role._continuations.forget(request)


def test_an_incomplete_load_has_its_token_forced(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff, token=OTHER)
    lost(engine, request, handoff)
    assert next_step(engine, request).kv_connector_metadata.first_tokens == {handoff: OTHER}


def test_a_request_that_workers_know_already_has_its_token_forced(engine: Engine, producer: _kvpipe.Control) -> None:
    """It was preempted before its output, and is loaded a second time."""
    request, handoff = consuming(engine, producer, prompt(400))
    opened(producer, request, handoff, token=OTHER)
    lost(engine, request, handoff)
    until(lambda: handoff in engine.step()[1].first_tokens)  # the first of two chunks
    engine.scheduler._preempt_request(request, 0.0)
    engine.scheduler.running.remove(request)
    loaded(engine, request, handoff)
    assert forced(engine, request, handoff) == OTHER


@pytest.mark.parametrize(("num_free", "is_continued"), [(0, False), (1, True)])
def test_a_prompt_that_ends_with_its_block_continues_into_a_free_one(
    tiny_model: str, producer: _kvpipe.Control, num_free: int, *, is_continued: bool
) -> None:
    engine = Engine(engine_config(tiny_model, {"scheduler_cls": CLASS}), num_blocks=1 + 2 + num_free)
    request, handoff = asked(engine, producer, 2 * BLOCK, max_tokens=2)
    assert bool(engine.scheduler._continued.tokens) is is_continued
    if not is_continued:
        assert next_step(engine, request).kv_connector_metadata.first_tokens == {handoff: OTHER}
    engine.finish_all()
    engine.close()
    assert_nothing_is_left()


def test_a_preempted_request_stays_continued_and_sends_its_token_once(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, _ = asked(engine, producer)
    next_step(engine, request)
    engine.scheduler._preempt_request(request, 0.0)
    engine.scheduler.running.remove(request)
    cached = next_step(engine, request).scheduled_cached_reqs
    assert (cached.req_ids, cached.num_output_tokens) == ([request.request_id], [1])
    until(lambda: engine.step() and request.is_finished())
    assert engine.sent[request.request_id] == [OTHER, OWN, OWN, OWN] == list(request.output_token_ids)


def test_a_request_that_is_aborted_before_its_first_step_leaves_nothing(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, _ = asked(engine, producer)
    assert engine.scheduler._continued.tokens == {request.request_id: OTHER}
    engine.abort(request)
    assert_nothing_is_left()


def test_an_engine_leaves_a_request_alone_whose_id_continues_on_another_engine_of_its_process(
    engine: Engine, producer: _kvpipe.Control, tiny_model: str
) -> None:
    request, _ = asked(engine, producer)
    other = Engine(engine_config(tiny_model, {"scheduler_cls": CLASS}))
    alike = other.add(list(range(40)), request_id=request.request_id)
    (new,) = other.scheduler.schedule().scheduled_new_reqs
    assert new.prompt_token_ids == alike.prompt_token_ids == list(range(40))
    other.finish_all()
    other.close()
    assert engine.scheduler._continued.tokens == {request.request_id: OTHER}


def test_a_request_that_ends_with_its_second_token_sends_both(engine: Engine, producer: _kvpipe.Control) -> None:
    request, _ = asked(engine, producer, max_tokens=2)
    next_step(engine, request)
    assert request.is_finished()
    assert engine.sent[request.request_id] == [OTHER, OWN]


def test_vllms_own_scheduler_continues_nothing(new_engine: Any, producer: _kvpipe.Control) -> None:
    engine = new_engine()
    request, handoff = asked(engine, producer)
    assert next_step(engine, request).kv_connector_metadata.first_tokens == {handoff: OTHER}


@pytest.mark.parametrize(
    ("part", "field", "value", "reason"),
    [
        ("parallel_config", "pipeline_parallel_size", 2, "pipeline"),
        ("structured_outputs_config", "reasoning_parser", "qwen3", "reasoning parser"),
        ("model_config", "logits_processors", ["a.module:Processor"], "logits processors"),
        ("model_config", "return_sampling_mask", True, "sampling masks"),
    ],
)
def test_an_engine_in_which_no_request_can_continue_says_why(
    log: pytest.LogCaptureFixture, part: str, field: str, value: Any, reason: str
) -> None:
    """Not a real configuration: most of these need a GPU, or what they name."""
    config = SimpleNamespace(
        use_v2_model_runner=False,
        scheduler_config=SimpleNamespace(
            scheduler_cls=CLASS, get_scheduler_cls=lambda: continuing_scheduler.ContinuingScheduler
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        structured_outputs_config=SimpleNamespace(reasoning_parser=""),
        model_config=SimpleNamespace(logits_processors=None, return_sampling_mask=False, max_model_len=2048),
        cache_config=SimpleNamespace(block_size=BLOCK),
        kv_transfer_config=SimpleNamespace(engine_id="engine"),
    )
    request = Request("request", prompt(100), SamplingParams(max_tokens=4, ignore_eos=True), None)
    continuations = continuing_scheduler.Continuations(config, [BLOCK])
    assert continuations.begin(request, OTHER)
    continuations.forget(request)
    setattr(getattr(config, part), field, value)
    request = Request("request", prompt(100), SamplingParams(max_tokens=4, ignore_eos=True), None)
    with log.at_level(logging.WARNING):
        assert not continuing_scheduler.Continuations(config, [BLOCK]).begin(request, OTHER)
    assert "continuing.off" in log.text
    assert reason in log.text


def test_a_logits_processor_of_another_package_is_noticed(monkeypatch: pytest.MonkeyPatch, tiny_model: str) -> None:
    config = engine_config(tiny_model, {"scheduler_cls": CLASS})
    assert not continuing_scheduler._refusal(config)
    other = SimpleNamespace(value="another.package:Processor")
    monkeypatch.setattr(continuing_scheduler, "entry_points", lambda group: [*entry_points(group=group), other])
    assert "logits processors" in continuing_scheduler._refusal(config)


@pytest.mark.parametrize("field", ["resumable", "mm_features", "num_preemptions"])
def test_requests_that_vllm_treats_in_ways_of_their_own_take_two_steps(engine: Engine, field: str) -> None:
    request = Request("request", prompt(100), SamplingParams(max_tokens=4, ignore_eos=True), None)
    setattr(request, field, [object()] if field == "mm_features" else 1)
    assert not engine.role._continuations.begin(request, OTHER)


def test_vllm_has_the_fields_that_are_used_here() -> None:
    """Its scheduler is no public interface."""
    assert {"schedule", "update_from_output"} <= set(vars(Scheduler))
    assert {"schedule", "update_from_output"}.isdisjoint(vars(AsyncScheduler))
    assert {"request_id", "new_token_ids"} <= set(EngineCoreOutput.__struct_fields__)
    assert {"prompt_token_ids", "prefill_token_ids"} <= NewRequestData.__dataclass_fields__.keys()
    assert "num_output_tokens" in CachedRequestData.__dataclass_fields__
