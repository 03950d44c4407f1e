"""A logits processor that forces the producer's first token on the consumer, for both of vLLM's model runners.

Before each step the worker role sets the pending first tokens. The processor, in the same process, looks them up when
vLLM applies it. It finds a request by the handoff id in its parameters, and its first output by position. So a request
that was preempted or computed in chunks is forced once, at its first token.

Sources: `vllm/v1/sample/logits_processor/interface.py` and `vllm/v1/worker/gpu/sample/logits_processor/interface.py`
of vLLM 0.32.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1LogitsProcessor

from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import ConsumeParams, LoadParams, parse

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2LogitsProcessor
except ImportError:  # another vLLM; a failed import would stop every engine, also those without kvpipe
    V2LogitsProcessor = object

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState


class PendingFirstTokens:
    """First tokens to force in the current step of this worker process.

    Attributes:
        tokens: Token id by handoff.
        has_processor: Whether this process has a processor that forces them.
    """

    def __init__(self) -> None:
        self.tokens: dict[bytes, int] = {}
        self.has_processor = False
        self._by_connector: dict[str, dict[bytes, int]] = {}

    def set(self, connector: str, tokens: dict[bytes, int]) -> None:
        """Sets the tokens of one connector; under MultiConnector there may be two."""
        self._by_connector[connector] = tokens
        self.tokens = {handoff: token for each in self._by_connector.values() for handoff, token in each.items()}


# Global, because vLLM makes the processor and the worker role, and neither has a reference to the other.
PENDING_FIRST_TOKENS = PendingFirstTokens()


class FirstToken(V1LogitsProcessor, V2LogitsProcessor):
    """Masks all tokens but the producer's at the first output of a consuming request.

    Sampling itself is unchanged: penalties, grammar, stop strings and seeded generators advance as on one instance.
    """

    def __init__(self, vllm_config: VllmConfig, *state: Any) -> None:
        """Accepts the arguments of either runner: V1 gives a device and a pinning flag, V2 its request state."""
        self._requests: LogitsProcRequestState | None = state[0] if len(state) == 1 else None
        # V1: handoff and output ids by row; V2: handoff by slot.
        self._rows: dict[int, tuple[bytes, list[int]]] = {}
        self._slots: dict[int, bytes] = {}
        # Draft tokens have rows of their own.
        PENDING_FIRST_TOKENS.has_processor = vllm_config.speculative_config is None

    def is_argmax_invariant(self) -> bool:
        """Always false: it changes greedy sampling too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """V1: tracks the rows of consuming requests without output."""
        process_dict_updates(self._rows, batch_update, _consuming_row)
        for row in [row for row, (_, output_ids) in self._rows.items() if output_ids]:
            del self._rows[row]

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """V2: tracks the slot of a consuming request."""
        handoff = consumed_handoff(sampling_params)
        if handoff is None:
            self._slots.pop(req_idx, None)
            return False
        self._slots[req_idx] = handoff
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Forces pending first tokens.

        Args:
            logits: `[num_rows, vocab_size]`, changed in place.
            ctx: V2: the batch of this step.
        """
        if PENDING_FIRST_TOKENS.tokens:
            for row, handoff in self._first_rows() if ctx is None else self._first_rows_of(ctx):
                token = PENDING_FIRST_TOKENS.tokens.get(handoff)
                if token is not None:
                    logits[row].fill_(float("-inf"))
                    logits[row, token] = 0
        return logits

    def _first_rows(self) -> list[tuple[int, bytes]]:
        return [(row, handoff) for row, (handoff, output_ids) in self._rows.items() if not output_ids]

    def _first_rows_of(self, ctx: LogitsContext) -> list[tuple[int, bytes]]:
        requests, slots = self._requests, enumerate(ctx.idx_mapping_np.tolist())
        if requests is None:
            return []
        return [
            (row, self._slots[slot])
            for row, slot in slots
            if slot in self._slots and ctx.seq_lens_upper_bound_np[row] == requests.prompt_len.np[slot]
        ]


def _consuming_row(params: SamplingParams, _: Any, output_ids: list[int]) -> tuple[bytes, list[int]] | None:
    handoff = consumed_handoff(params)
    return None if handoff is None else (handoff, output_ids)


def consumed_handoff(params: SamplingParams) -> bytes | None:
    """Returns the handoff that a request's parameters name; any client may have sent them."""
    try:
        found = parse((params.extra_args or {}).get("kv_transfer_params"))
    except ConfigError:
        return None
    return found.handoff if isinstance(found, ConsumeParams | LoadParams) else None


def hide_handoff_from_workers(request: Request) -> None:
    """Takes a handoff that belongs to another request out of what the workers get, who would force its first token.

    The requests that vLLM makes of one share their parameters, so that these are replaced, and not changed.
    """
    params = request.sampling_params
    if params is not None and consumed_handoff(params) is not None:
        request.sampling_params = copy.copy(params)
        request.sampling_params.extra_args = {
            name: value for name, value in (params.extra_args or {}).items() if name != "kv_transfer_params"
        }
