"""A logits processor that forces the first outputs of a consumer, for both of vLLM's model runners.

They are the producer's first token, or all tokens that a resumed request brings. Before each step the worker role sets
the pending first tokens. The processor, in the same process, looks them up when vLLM applies it. It finds a request by
the handoff id in its parameters, and an output by its position. The tokens after the first are in the parameters too.
So a request that was preempted or computed in chunks is forced at each of these outputs, and at no other.

Sources: `vllm/v1/sample/logits_processor/interface.py` and `vllm/v1/worker/gpu/sample/logits_processor/interface.py`
of vLLM 0.32.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1LogitsProcessor

from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import ConsumeParams, LoadParams, parse
from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2LogitsProcessor
except ImportError:  # another vLLM; a failed import would stop every engine, also those without kvpipe
    V2LogitsProcessor = object

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState


@dataclass(frozen=True, slots=True)
class ForcedOutputs:
    """First outputs of a consuming request, by its parameters.

    Attributes:
        handoff: The handoff's id.
        tokens: Tokens that the request brings; empty: its producer's first token alone is forced.
    """

    handoff: bytes
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, params: SamplingParams) -> ForcedOutputs | None:
        """Reads a request's parameters; returns `None` if it consumes no handoff. Any client may have sent them."""
        try:
            found = parse((params.extra_args or {}).get("kv_transfer_params"))
        except ConfigError:
            return None
        if isinstance(found, ConsumeParams):
            return cls(found.handoff, found.tokens)
        return cls(found.handoff, ()) if isinstance(found, LoadParams) else None

    def token(self, pending: Mapping[bytes, int], position: int) -> int | None:
        """Returns the token to force in this step, at a position of the output; `None` if there is none."""
        first = pending.get(self.handoff)
        if first is None or position == 0:
            return first
        return self.tokens[position] if 0 < position < len(self.tokens) else None


class FirstToken(V1LogitsProcessor, V2LogitsProcessor):
    """Masks all tokens but the forced one at the first outputs of a consuming request.

    Sampling itself is unchanged: penalties, grammar, stop strings and seeded generators advance as on one instance.
    """

    def __init__(self, vllm_config: VllmConfig, *state: Any) -> None:
        """Accepts the arguments of either runner: V1 gives a device and a pinning flag, V2 its request state."""
        transfer = vllm_config.kv_transfer_config
        self._engine_id = "" if transfer is None else str(transfer.engine_id)
        self._requests: LogitsProcRequestState | None = state[0] if len(state) == 1 else None
        # V1: by row, with vLLM's own list of output ids; V2: by slot.
        self._rows: dict[int, tuple[ForcedOutputs, list[int]]] = {}
        self._slots: dict[int, ForcedOutputs] = {}
        # Draft tokens have rows of their own.
        PENDING_FIRST_TOKENS.has_processor = vllm_config.speculative_config is None

    def is_argmax_invariant(self) -> bool:
        """Always false: it changes greedy sampling too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """V1: tracks the rows of consuming requests, for all their life: vLLM may throw outputs away."""
        process_dict_updates(self._rows, batch_update, _consuming_row)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """V2: tracks the slot of a consuming request."""
        forced = ForcedOutputs.of(sampling_params)
        if forced is None:
            self._slots.pop(req_idx, None)
            return False
        self._slots[req_idx] = forced
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Forces the outputs of requests whose first token is pending.

        Args:
            logits: `[num_rows, vocab_size]`, changed in place.
            ctx: V2: the batch of this step.
        """
        if pending := PENDING_FIRST_TOKENS.of(self._engine_id):
            for row, forced, position in self._rows_of_v1(pending) if ctx is None else self._rows_of_v2(pending, ctx):
                token = forced.token(pending, position)
                if token is not None:
                    logits[row].fill_(float("-inf"))
                    logits[row, token] = 0
        return logits

    def _rows_of_v1(self, pending: Mapping[bytes, int]) -> list[tuple[int, ForcedOutputs, int]]:
        return [
            (row, forced, len(output_ids))
            for row, (forced, output_ids) in self._rows.items()
            if forced.handoff in pending
        ]

    def _rows_of_v2(self, pending: Mapping[bytes, int], ctx: LogitsContext) -> list[tuple[int, ForcedOutputs, int]]:
        requests, slots = self._requests, enumerate(ctx.idx_mapping_np.tolist())
        if requests is None:
            return []
        # Within a chunk of the prompt the position is negative.
        return [
            (row, forced, int(ctx.seq_lens_upper_bound_np[row] - requests.prompt_len.np[slot]))
            for row, slot in slots
            if (forced := self._slots.get(slot)) is not None and forced.handoff in pending
        ]


def _consuming_row(params: SamplingParams, _: Any, output_ids: list[int]) -> tuple[ForcedOutputs, list[int]] | None:
    forced = ForcedOutputs.of(params)
    return None if forced is None else (forced, output_ids)


def hide_handoff_from_workers(request: Request) -> None:
    """Takes a handoff that belongs to another request out of what the workers get, who would force its outputs.

    The requests that vLLM makes of one share their parameters, so that these are replaced, and not changed.
    """
    params = request.sampling_params
    if params is not None and ForcedOutputs.of(params) is not None:
        request.sampling_params = copy.copy(params)
        request.sampling_params.extra_args = {
            name: value for name, value in (params.extra_args or {}).items() if name != "kv_transfer_params"
        }
