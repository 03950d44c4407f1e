"""Forced outputs: vLLM's own loaders take the processor, and it forces the first outputs and nothing else."""

import copy
import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor import build_logitsprocs
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from kvpipe.transfer_params import consume, produce, resume
from kvpipe.vllm.first_token.logits_processor import FirstToken, ForcedOutputs
from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS
from tests.vllm.handoff.engine import new_id

pytestmark = pytest.mark.vllm

VOCAB = 16


def of_v2(module: str) -> Any:
    """A module of the V2 model runner's logits processors. The test is skipped where it takes none."""
    if vllm.__version__.startswith("0.30."):
        pytest.skip("the V2 model runner of vLLM 0.30 takes no logits processors")
    return importlib.import_module(f"vllm.v1.worker.gpu.sample.logits_processor.{module}")


@pytest.fixture(autouse=True)
def _nothing_due() -> Any:
    yield
    PENDING_FIRST_TOKENS._by_engine = {}


def consuming(handoff: str) -> SamplingParams:
    return SamplingParams(extra_args={"kv_transfer_params": consume(handoff, "127.0.0.1:1")})


def resuming(handoff: str, *tokens: int) -> SamplingParams:
    return SamplingParams(extra_args={"kv_transfer_params": resume(handoff, tokens)})


def v1(config: VllmConfig) -> FirstToken:
    """The processor as V1's model runner gets it."""
    made = build_logitsprocs(config, torch.device("cpu"), is_pin_memory=False, is_pooling_model=False)
    (found,) = (one for one in made.non_argmax_invariant if isinstance(one, FirstToken))
    return found


def v2(config: VllmConfig, num_requests: int = 4) -> FirstToken:
    """The processor as V2's gets it. Its buffers need a GPU: these are their host side."""
    lengths = SimpleNamespace(np=np.zeros(num_requests, np.int32))
    fields = ("device", "max_num_reqs", "vocab_size", "all_token_ids", "prefill_len", "total_len")
    state: Any = SimpleNamespace(prompt_len=lengths, **dict.fromkeys(fields))
    (found,) = of_v2("loader").build_custom_logits_processors(config, state, is_pooling_model=False)
    assert isinstance(found, FirstToken)
    return found


def added(*requests: tuple[int, SamplingParams, list[int]], **more: Any) -> BatchUpdate:
    rows = [(row, params, None, output_ids) for row, params, output_ids in requests]
    return BatchUpdate(batch_size=4, added=rows, removed=more.get("removed", []), moved=more.get("moved", []))


def forced(processor: FirstToken, *context: Any) -> dict[int, int]:
    """The forced token of each of four rows, for rows that have one."""
    logits = processor.apply(torch.ones(4, VOCAB), *context)
    allowed = [torch.isfinite(row).nonzero().flatten().tolist() for row in logits]
    return {row: tokens[0] for row, tokens in enumerate(allowed) if len(tokens) == 1}


def due(config: VllmConfig, **tokens: int) -> None:
    by_handoff = {bytes.fromhex(handoff): token for handoff, token in tokens.items()}
    PENDING_FIRST_TOKENS.set(str(config.kv_transfer_config.engine_id), "KVPipeConnector", by_handoff)


def test_v1_loads_the_processor_of_the_entry_point(config: VllmConfig) -> None:
    PENDING_FIRST_TOKENS.has_processor = False
    assert not v1(config).is_argmax_invariant()
    assert PENDING_FIRST_TOKENS.has_processor


def test_v2_loads_the_processor_of_the_entry_point(config: VllmConfig) -> None:
    PENDING_FIRST_TOKENS.has_processor = False
    assert v2(config).add_request(0, consuming(new_id()))
    assert PENDING_FIRST_TOKENS.has_processor


def test_v1_forces_the_first_output_and_no_other(config: VllmConfig) -> None:
    processor, handoff, output_ids = v1(config), new_id(), []
    processor.update_state(added((2, consuming(handoff), output_ids), (3, SamplingParams(), [])))
    due(config, **{handoff: 9})
    assert forced(processor) == {2: 9}
    # The step was preempted or thrown away: there is still no output.
    processor.update_state(None)
    assert forced(processor) == {2: 9}
    output_ids.append(9)
    processor.update_state(None)
    assert forced(processor) == {}


def test_v1_forces_the_tokens_that_a_request_brings_and_no_other(config: VllmConfig) -> None:
    processor, handoff, output_ids = v1(config), new_id(), []
    processor.update_state(added((1, resuming(handoff, 9, 4, 9), output_ids), (2, SamplingParams(), [])))
    due(config, **{handoff: 9})
    for token in (9, 4, 9):
        # The step may be thrown away.
        for _ in range(2):
            processor.update_state(None)
            assert forced(processor) == {1: token}
        # With asynchronous scheduling vLLM does not know the output yet.
        output_ids.append(-1)
    processor.update_state(None)
    assert forced(processor) == {}


def test_v1_goes_on_where_a_preempted_request_was(config: VllmConfig) -> None:
    processor, handoff = v1(config), new_id()
    params = resuming(handoff, 9, 4, 5)
    processor.update_state(added((1, params, [9, 4, 5])))
    due(config, **{handoff: 9})
    assert forced(processor) == {}
    processor.update_state(added(removed=[1]))
    assert forced(processor) == {}
    processor.update_state(added((3, params, [9, 4])))
    assert forced(processor) == {3: 5}


def test_outputs_that_vllm_throws_away_are_forced_again(config: VllmConfig) -> None:
    """It cuts its own list of them after a failed load of another connector."""
    processor, handoff, output_ids = v1(config), new_id(), []
    processor.update_state(added((0, resuming(handoff, 9, 4), output_ids)))
    due(config, **{handoff: 9})
    output_ids += [-1, -1]
    processor.update_state(None)
    assert forced(processor) == {}
    del output_ids[1:]
    assert forced(processor) == {0: 4}


def test_further_tokens_are_forced_only_where_the_first_one_is(config: VllmConfig) -> None:
    processor, handoff = v1(config), new_id()
    processor.update_state(added((0, resuming(handoff, 9, 4), [9])))
    due(config, **{new_id(): 9})
    assert forced(processor) == {}
    due(config, **{handoff: 9})
    assert forced(processor) == {0: 4}


def test_engines_of_one_process_force_what_is_pending_in_their_own_step(config: VllmConfig) -> None:
    other = copy.copy(config)
    other.kv_transfer_config = dataclasses.replace(config.kv_transfer_config, engine_id="other")
    handoffs = new_id(), new_id()
    processors = v1(config), v1(other)
    for processor in processors:
        requests = [(row, resuming(handoff, 9, 4), [9]) for row, handoff in enumerate(handoffs)]
        processor.update_state(added(*requests))
    due(config, **{handoffs[0]: 9})
    due(other, **{handoffs[1]: 9})
    assert [forced(processor) for processor in processors] == [{0: 4}, {1: 4}]
    due(config)
    assert [forced(processor) for processor in processors] == [{}, {1: 4}]


def test_v1_follows_requests_that_move_in_the_batch(config: VllmConfig) -> None:
    processor, one, other = v1(config), new_id(), new_id()
    processor.update_state(added((0, consuming(one), []), (1, consuming(other), [])))
    due(config, **{one: 5, other: 6})
    processor.update_state(added(moved=[(0, 1, MoveDirectionality.SWAP)]))
    assert forced(processor) == {1: 5, 0: 6}
    processor.update_state(added(removed=[1], moved=[(0, 3, MoveDirectionality.UNIDIRECTIONAL)]))
    assert forced(processor) == {3: 6}
    processor.update_state(added((3, SamplingParams(), [])))
    assert forced(processor) == {}


def context(slots: list[int], lengths: list[int]) -> Any:
    none: Any = None
    return of_v2("interface").LogitsContext(
        expanded_idx_mapping=none,
        idx_mapping=none,
        idx_mapping_np=np.array(slots),
        expanded_local_pos=none,
        input_ids=none,
        pos=none,
        seq_lens_upper_bound_np=np.array(lengths),
    )


def test_v2_forces_the_first_output_and_no_other(config: VllmConfig) -> None:
    processor, handoff = v2(config), new_id()
    processor._requests.prompt_len.np[:] = [20, 10, 0, 0]
    processor.add_request(1, consuming(handoff))
    processor.add_request(0, SamplingParams())
    due(config, **{handoff: 7})
    assert forced(processor, context([0, 1], [20, 6])) == {}  # a chunk of the prompt
    assert forced(processor, context([0, 1], [21, 10])) == {1: 7}
    assert forced(processor, context([1, 0], [11, 22])) == {}  # its second output
    processor.add_request(1, SamplingParams())  # the slot's next request
    assert forced(processor, context([1], [10])) == {}


def test_v2_forces_the_tokens_that_a_request_brings_and_no_other(config: VllmConfig) -> None:
    processor, handoff = v2(config), new_id()
    processor._requests.prompt_len.np[:] = [20, 10, 0, 0]
    processor.add_request(1, resuming(handoff, 7, 3))
    processor.add_request(0, SamplingParams())
    due(config, **{handoff: 7})
    assert forced(processor, context([0, 1], [22, 8])) == {}  # a chunk of the prompt
    assert forced(processor, context([0, 1], [22, 10])) == {1: 7}
    assert forced(processor, context([1, 0], [11, 23])) == {0: 3}
    assert forced(processor, context([1, 0], [12, 24])) == {}
    processor.add_request(2, resuming(handoff, 7, 3))  # preempted after its first output, in another slot
    processor._requests.prompt_len.np[2] = 10
    assert forced(processor, context([2], [11])) == {0: 3}


@pytest.mark.parametrize(
    "extra",
    [None, {}, {"kv_transfer_params": 1}, {"kv_transfer_params": {"kvpipe": 1}}]
    + [{"kv_transfer_params": consume(bad, "127.0.0.1:1")} for bad in (None, "", "zz", 5)]
    + [{"kv_transfer_params": produce("0" * 32)}],
)
def test_parameters_of_others_are_ignored(extra: Any) -> None:
    assert ForcedOutputs.of(SamplingParams(extra_args=extra)) is None


def sampled(config: VllmConfig, params: SamplingParams, *output_ids: int) -> int:
    """Result of vLLM's sampler for even logits, for one request with one token of prompt and these outputs."""
    made = build_logitsprocs(config, torch.device("cpu"), is_pin_memory=False, is_pooling_model=False)
    for processor in made.all:
        processor.update_state(BatchUpdate(1, removed=[], added=[(0, params, [1], list(output_ids))], moved=[]))
    is_greedy = params.temperature == 0
    metadata = SamplingMetadata(
        temperature=None if is_greedy else torch.tensor([params.temperature]),
        all_greedy=is_greedy,
        all_random=not is_greedy,
        top_p=torch.tensor([params.top_p]),
        top_k=torch.tensor([params.top_k or VOCAB]),
        generators={},
        max_num_logprobs=None,
        no_penalties=False,
        prompt_token_ids=torch.tensor([[1]]),
        frequency_penalties=torch.tensor([params.frequency_penalty]),
        presence_penalties=torch.tensor([params.presence_penalty]),
        repetition_penalties=torch.tensor([params.repetition_penalty]),
        output_token_ids=[list(output_ids)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=made,
    )
    return int(Sampler()(torch.ones(1, VOCAB), metadata).sampled_token_ids[0, 0])


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.0}, {"temperature": 1.2, "top_p": 0.95, "top_k": 3, "min_p": 0.1, "seed": 5}]
)
def test_vllms_sampler_gives_the_forced_token_under_penalties_and_bias(
    config: VllmConfig, sampling: dict[str, Any]
) -> None:
    handoff = new_id()
    given = resuming(handoff, 11, 11, 5)
    params = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias={3: 50.0},
        extra_args=given.extra_args,
        **sampling,
    )
    due(config, **{handoff: 11})
    assert sampled(config, params) == 11
    assert sampled(config, params, 11) == 11
    assert sampled(config, params, 11, 11) == 5
    due(config)
    assert sampled(config, params) == 3
