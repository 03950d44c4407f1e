"""First tokens that workers force for the scheduler role, under vLLM's real scheduler."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request, RequestStatus

from kvpipe import _kvpipe
from kvpipe.control import ControlClient
from kvpipe.transfer_params import consume, parse, produce, resume
from kvpipe.vllm.first_token.logits_processor import ForcedOutputs
from kvpipe.vllm.handoff.consumer.state_machine import Phase
from kvpipe.vllm.handoff.metadata import HandshakeMetadata
from kvpipe.vllm.prompt_hash import prompt_hash
from tests.vllm.handoff.engine import BLOCK, SAMPLING, Engine, engine_config, new_id, outcome, sampling
from tests.vllm.handoff.test_scheduler import RANKS, consuming, loading, opened, prompt, reported, until

pytestmark = pytest.mark.vllm

THEIRS = 7  # what `opened` says that the producer has sampled


def forced(engine: Engine, request: Request, handoff: bytes) -> int | None:
    """The first token that goes along with the step in which the prompt of a request is done."""

    def done() -> Any:
        output, metadata = engine.step()
        return metadata if request.num_output_tokens and output.num_scheduled_tokens.get(request.request_id) else None

    return until(done).first_tokens.get(handoff)


def finish_received(engine: Engine, handoff: bytes) -> None:
    """The producer's message on the sequence state may arrive after the one that opens the handoff."""
    until(lambda: engine.step() and engine.role._consuming._consumed.of(handoff).load.phase is Phase.FINISHING)


def loaded(engine: Engine, request: Request, handoff: bytes) -> None:
    loading(engine, request)
    finish_received(engine, handoff)  # no worker reports a load as complete before
    engine.step(finished_recving={request.request_id}, kv_connector_worker_meta=outcome(request))


def lost(engine: Engine, request: Request, handoff: bytes) -> None:
    """A load ends without any block."""
    begun = loading(engine, request)
    finish_received(engine, handoff)
    engine.step(
        finished_recving={request.request_id},
        invalid_block_ids=set(begun.block_ids),
        kv_connector_worker_meta=outcome(request, is_loaded=False),
    )


def with_sampling(params: SamplingParams) -> Request:
    return Request("theirs", [1], params, None)


def test_the_producers_token_goes_along_until_there_is_an_output(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loaded(engine, request, handoff)
    assert forced(engine, request, handoff) == THEIRS
    assert engine.step()[1].first_tokens == {}
    assert reported(engine, handoff.hex())["first_token"] == "exact"


def test_steps_look_at_a_request_until_it_has_its_first_output_and_again_when_it_is_preempted(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(engine, producer, prompt(100))
    opened(producer, request, handoff)
    loaded(engine, request, handoff)
    looked_at = engine.role._consuming._consumed._in_steps
    assert request.request_id in looked_at
    assert forced(engine, request, handoff) == THEIRS
    engine.step()
    assert looked_at == {}
    assert handoff in engine.role._consuming._consumed._request_ids
    engine.scheduler._preempt_request(request, 0.0)
    engine.scheduler.running.remove(request)
    engine.scheduler.connector.get_num_new_matched_tokens(request, 0)
    assert request.request_id in looked_at
    until(lambda: engine.step() and not looked_at)
    engine.finish_all()
    assert engine.role._consuming.is_idle()


def test_it_is_forced_when_blocks_are_missing_too(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(500))
    opened(producer, request, handoff)
    lost(engine, request, handoff)
    assert forced(engine, request, handoff) == THEIRS
    result = reported(engine, handoff.hex())
    assert (result["result"], result["first_token"]) == ("missing", "exact")


def test_a_request_that_is_preempted_before_its_output_is_forced_again(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    request, handoff = consuming(engine, producer, prompt(400))
    opened(producer, request, handoff)
    lost(engine, request, handoff)
    until(lambda: handoff in engine.step()[1].first_tokens)  # the first of two chunks
    assert request.num_output_tokens == 0
    engine.scheduler._preempt_request(request, 0.0)
    engine.scheduler.running.remove(request)
    loaded(engine, request, handoff)
    assert forced(engine, request, handoff) == THEIRS


def test_a_request_whose_kv_is_all_cached_waits_for_the_producers_token(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    tokens = prompt(2 * BLOCK + 1)
    first = engine.add(tokens)
    until(lambda: engine.step() and first.is_finished())
    request, handoff = consuming(engine, producer, tokens)
    producer.open(handoff, prompt_hash(request), request.num_prompt_tokens, [("127.0.0.1:1", bytes(16))])
    until(lambda: engine.step() and engine.role._consuming._consumed.of(handoff).load.phase is Phase.OPENED)
    for _ in range(20):
        assert not engine.step()[0].num_scheduled_tokens
    producer.finish(handoff, [THEIRS], "length", 0, SAMPLING.hash(request))
    assert forced(engine, request, handoff) == THEIRS


def test_a_token_given_with_a_producer_is_not_forced_for_another_prompt(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    """A router passes P's answer on, with its token. Only P itself says to which prompt the token belongs."""
    handoff = new_id()
    params = consume(handoff, producer.address) | {"kvpipe": {"handoff": handoff, "num_tokens": 40, "first_token": 9}}
    request = engine.add(prompt(40), params=params)
    producer.open(bytes.fromhex(handoff), bytes(32), 40, RANKS)
    producer.finish(bytes.fromhex(handoff), [9], "length", 0, SAMPLING.hash(request))
    assert forced(engine, request, bytes.fromhex(handoff)) is None
    assert reported(engine, handoff)["first_token"] == "sampled"


def test_a_token_without_a_producer_is_forced_and_no_producer_is_waited_for(engine: Engine) -> None:
    handoff = "0b" * 16
    request = engine.add(prompt(40), params=resume(handoff, [9]))
    assert engine.step()[1].first_tokens == {bytes.fromhex(handoff): 9}
    assert request.num_output_tokens == 1
    assert engine.step()[1].first_tokens == {}


def pending(engine: Engine, request: Request) -> list[int]:
    """The outputs of a request in whose steps tokens are forced, until it ends."""
    outputs = []
    handoff = ForcedOutputs.of(request.sampling_params).handoff

    def ended() -> bool:
        position = request.num_output_tokens
        if handoff in engine.step()[1].first_tokens and request.num_output_tokens > position:
            outputs.append(position)
        return request.is_finished()

    until(ended)
    return outputs


@pytest.mark.parametrize("length", [1, 40, 600])  # the last one in three chunks
def test_the_tokens_that_a_request_brings_are_forced_in_as_many_steps(engine: Engine, length: int) -> None:
    request = engine.add(prompt(length), max_tokens=6, params=resume(handoff := new_id(), [9, 8, 7]))
    assert pending(engine, request) == [0, 1, 2]
    assert (request.num_output_tokens, request.num_preemptions) == (6, 0)
    assert reported(engine, handoff)["first_token"] == "exact"


def test_a_resumed_request_that_is_preempted_is_forced_from_where_it_was(engine: Engine) -> None:
    request = engine.add(prompt(400), max_tokens=6, params=resume(new_id(), [9, 8, 7, 6]))
    until(lambda: engine.step() and request.num_output_tokens == 2)
    engine.scheduler._preempt_request(request, 0.0)
    engine.scheduler.running.remove(request)
    assert pending(engine, request) == [2, 3]


def test_with_asynchronous_scheduling_tokens_are_forced_in_the_steps_of_their_outputs(
    tiny_model: str,
) -> None:
    """vLLM schedules a step before it knows the output of the one before. Its CPU build has that switched off."""
    scheduler = "vllm.v1.core.sched.async_scheduler.AsyncScheduler"
    engine = Engine(engine_config(tiny_model, {"scheduler_cls": scheduler}))
    try:
        request = engine.add(prompt(100), max_tokens=6, params=resume(handoff := new_id(), [9, 8]))
        steps, is_forced = [], []
        while not request.is_finished():
            steps.append(output := engine.scheduler.schedule())
            is_forced.append(bytes.fromhex(handoff) in output.kv_connector_metadata.first_tokens)
            if len(steps) > 1:
                engine.end(steps.pop(0))
        assert is_forced == [True, True] + [False] * (len(is_forced) - 2)
    finally:
        engine.close()


def test_a_limit_that_the_given_tokens_reach_ends_the_request(engine: Engine) -> None:
    request = engine.add(prompt(40), max_tokens=2, params=resume(new_id(), [9, 8, 7, 6]))
    assert pending(engine, request) == [0, 1]
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED


def test_one_of_several_choices_is_not_resumed(engine: Engine) -> None:
    request = engine.add(prompt(40), params=resume(handoff := new_id(), [9, 8]), request_id="0_cmpl-1")
    assert pending(engine, request) == []
    assert "one of several choices" in reported(engine, handoff)["first_token_reason"]


def test_more_tokens_than_the_engine_can_hold_are_not_forced(engine: Engine, log: pytest.LogCaptureFixture) -> None:
    request = engine.add(prompt(40), params=resume(new_id(), [9] * 2049))
    assert ForcedOutputs.of(request.sampling_params) is None
    assert engine.step()[1].first_tokens == {}
    assert "tokens of length 2049: expected 2048 at most" in log.text


def test_the_producers_answer_names_the_token_unless_the_handoff_was_withdrawn(engine: Engine) -> None:
    for is_withdrawn in (False, True):
        request = engine.add(prompt(40), max_tokens=1, params=produce(new_id()))
        request.append_output_token_ids(5)
        produced = engine.role._producing._produced.get(request.request_id)
        produced.is_open, produced.is_withdrawn = True, is_withdrawn
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        _, params = engine.role.finished(request, ([3, 4],))
        if is_withdrawn:
            assert params is None
        else:
            found = parse(params)
            assert (found.handoff, found.producer) == (produced.handoff, engine.role.address)
            assert (params["kvpipe"]["first_token"], params["remote_block_ids"]) == (5, [[3, 4]])
        engine.scheduler.requests.pop(request.request_id)
        engine.scheduler.waiting.remove_requests([request])


def test_an_engine_reports_whether_it_forces_tokens(engine: Engine) -> None:
    client = ControlClient("")
    try:
        for forces in (True, False):
            engine.role.set_workers({(0, 0): HandshakeMetadata("127.0.0.1:1", bytes(16), forces_first_tokens=forces)})
            assert client.describe(engine.role.address).wait(5)["forces_first_tokens"] is forces
        engine.role.set_workers({})
        assert client.describe(engine.role.address).wait(5)["forces_first_tokens"] is False
    finally:
        client.close()


@pytest.mark.parametrize("tokens", [[-1], [1 << 31], [9, 8, 1 << 31], [9, -1, 8]])
def test_a_token_outside_the_vocabulary_never_reaches_the_sampler_nor_do_those_beside_it(
    engine: Engine, tokens: list[int]
) -> None:
    handoff = new_id()
    request = engine.add(prompt(40), params=resume(handoff, tokens))
    assert pending(engine, request) == []
    result = reported(engine, handoff)
    assert result["first_token"] == "sampled"
    assert "outside the vocabulary" in result["first_token_reason"]


def test_without_the_processor_decode_samples_and_reports_the_reason(engine: Engine, producer: _kvpipe.Control) -> None:
    engine.role.set_workers({(0, 0): HandshakeMetadata("127.0.0.1:1", bytes(16), forces_first_tokens=False)})
    request, handoff = consuming(engine, producer, prompt(40))
    opened(producer, request, handoff)
    loaded(engine, request, handoff)
    assert forced(engine, request, handoff) is None
    assert "logits processor" in reported(engine, handoff.hex())["first_token_reason"]


def test_one_of_several_choices_loads_all_kv_and_samples_its_own_first_token(
    engine: Engine, producer: _kvpipe.Control
) -> None:
    """The handoff that the producer's answer names is that of the choice that ended last, with a seed of its own."""
    sampling = SamplingParams(n=2, seed=9)
    parent = ParentRequest(SimpleNamespace(request_id="cmpl-1", external_req_id="cmpl-1", params=sampling))
    (name, ours), (_, theirs) = parent.get_child_info(0), parent.get_child_info(1)
    assert ours.seed != theirs.seed
    handoff = new_id()
    request = engine.add(prompt(40), params=consume(handoff, producer.address), request_id=name)
    opened(producer, request, bytes.fromhex(handoff))
    loaded(engine, request, bytes.fromhex(handoff))
    assert forced(engine, request, bytes.fromhex(handoff)) is None
    result = reported(engine, handoff)
    assert (result["result"], result["first_token"]) == ("full", "sampled")
    assert "one of several choices" in result["first_token_reason"]


@pytest.mark.parametrize("is_late", [False, True])
def test_the_token_of_another_prompt_is_never_forced(
    engine: Engine, producer: _kvpipe.Control, *, is_late: bool
) -> None:
    request, handoff = consuming(engine, producer, prompt(40))
    producer.open(handoff, bytes(32), 40, [("127.0.0.1:1", bytes(16))])
    if is_late:
        engine.step()
    producer.finish(handoff, [THEIRS], "length", 0, SAMPLING.hash(request))
    assert forced(engine, request, handoff) is None
    assert reported(engine, handoff.hex())["first_token"] == "sampled"


@pytest.mark.parametrize(
    "theirs",
    [
        SamplingParams(temperature=0),
        SamplingParams(seed=8),
        SamplingParams(top_k=5),
        SamplingParams(logit_bias={5: 1.0}),
        SamplingParams(min_tokens=2, stop_token_ids=[9]),
        SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"])),
        SamplingParams(extra_args={"of_a_processor": 1}),
    ],
)
def test_a_token_that_was_sampled_with_other_parameters_is_not_forced(
    engine: Engine, producer: _kvpipe.Control, theirs: SamplingParams
) -> None:
    """A router may change a client's parameters for prefill; of a seeded request each child has a seed of its own."""
    request, handoff = consuming(engine, producer, prompt(40))
    producer.open(handoff, prompt_hash(request), 40, RANKS)
    producer.finish(handoff, [THEIRS], "length", 0, SAMPLING.hash(with_sampling(theirs)))
    loaded(engine, request, handoff)
    assert forced(engine, request, handoff) is None
    assert reported(engine, handoff.hex())["first_token_reason"] == "the producer sampled with other parameters"


def test_a_prefill_that_a_router_of_nixl_asks_for_samples_any_token(engine: Engine) -> None:
    """Such a router sends prefill a `min_tokens` that is not the client's, which would keep it from a stop token."""
    asked = SamplingParams(max_tokens=1, min_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}})
    request = engine.add(prompt(40), sampling_params=asked)
    assert (request.sampling_params.min_tokens, asked.min_tokens) == (0, 1)
    knowing = SamplingParams(max_tokens=1, min_tokens=1, extra_args={"kv_transfer_params": produce(new_id())})
    assert engine.add(prompt(40), sampling_params=knowing).sampling_params.min_tokens == 1


def test_a_token_that_an_engine_of_other_settings_sampled_is_not_forced() -> None:
    plain, choice = SamplingParams(), SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    parses, processes = sampling(reasoning_parser="qwen3"), sampling(logits_processors=("custom:Processor",))
    assert parses.hash(with_sampling(plain)) == SAMPLING.hash(with_sampling(plain))
    assert parses.hash(with_sampling(choice)) != SAMPLING.hash(with_sampling(choice))
    assert processes.hash(with_sampling(plain)) != SAMPLING.hash(with_sampling(plain))
    marks, unmarked = sampling(watermark="gumbel"), SamplingParams(watermarking=False)
    assert marks.hash(with_sampling(plain)) != SAMPLING.hash(with_sampling(plain))
    assert marks.hash(with_sampling(unmarked)) == SAMPLING.hash(with_sampling(plain))


def test_lengths_stops_and_logprobs_do_not_decide_whether_a_token_is_forced() -> None:
    theirs = SamplingParams(max_tokens=1, logprobs=2, stop=["x"], stop_token_ids=[9], min_tokens=0)
    assert SAMPLING.hash(with_sampling(theirs)) == SAMPLING.hash(with_sampling(SamplingParams(max_tokens=100)))
    one, many = (SamplingParams(min_tokens=n, max_tokens=99) for n in (1, 50))
    assert SAMPLING.hash(with_sampling(one)) == SAMPLING.hash(with_sampling(many))


def test_without_a_producer_decode_samples_and_reports_the_reason(engine: Engine, producer: _kvpipe.Control) -> None:
    request, handoff = consuming(engine, producer, prompt(40))
    producer.withdraw(handoff, "aborted")
    assert forced(engine, request, handoff) is None
    assert reported(engine, handoff.hex())["first_token_reason"] == "the producer's is not known"


@pytest.mark.parametrize(
    ("params", "mode", "reason"),
    [
        (SamplingParams(prompt_logprobs=1), "raw_logprobs", "prompt logprobs"),
        (SamplingParams(logprobs=1), "processed_logprobs", "masked distribution"),
        (SamplingParams(logprob_token_ids=[3]), "processed_logprobs", "masked distribution"),
        (SamplingParams(logprobs=1), "raw_logprobs", ""),
        (SamplingParams(), "processed_logits", ""),
    ],
)
def test_what_cannot_be_exact_is_named(
    new_engine: Callable[..., Engine], params: SamplingParams, mode: str, reason: str
) -> None:
    engine = new_engine()
    request = engine.add(prompt(10))
    request.sampling_params = params
    engine.role._first_token_support._logprobs_mode = mode
    found = engine.role._first_token_support.unsupported_reason(request)
    assert reason in found
    assert bool(found) == bool(reason)
