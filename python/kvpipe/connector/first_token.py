"""The producer's first token, forced on the consumer: a logits processor that both of vLLM's model runners load.

The worker role says before each step which tokens are due; the processor, in the same process, looks them up when it is
applied. A request is known by the handoff id in its parameters, its first output by its position: one that was
preempted or computed in several chunks is forced when it comes to its first token, and never again.

Sources: `vllm/v1/sample/logits_processor/interface.py` and `vllm/v1/worker/gpu/sample/logits_processor/interface.py`
of vLLM 0.32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import LogitsProcessor as V1LogitsProcessor

from kvpipe.control import parse_handoff
from kvpipe.exceptions import ConfigError

try:
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as V2LogitsProcessor
except ImportError:  # another vLLM: its loader would end every engine, also those without kvpipe
    V2LogitsProcessor = object

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.sample.logits_processor.interface import BatchUpdate
    from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState


class PendingFirstTokens:
    """First tokens that are due in the present step of this worker process.

    Attributes:
        tokens: Token id by handoff.
        has_processor: Whether a processor that forces them has been made in this process.
    """

    def __init__(self) -> None:
        self.tokens: dict[bytes, int] = {}
        self.has_processor = False


# Of this process: vLLM makes the processor and the connector's worker role, and neither knows the other.
PENDING_FIRST_TOKENS = PendingFirstTokens()


class FirstToken(V1LogitsProcessor, V2LogitsProcessor):
    """Masks everything but the producer's token at a consuming request's first output.

    Sampling goes on as without it: penalties, grammar, stop strings and a seeded generator advance as on one instance.
    """

    def __init__(self, vllm_config: VllmConfig, *state: Any) -> None:
        """Takes what either runner gives: V1 a device and whether memory is pinned, V2 its requests' state."""
        self._requests: LogitsProcRequestState | None = state[0] if len(state) == 1 else None
        # V1: handoff and output ids by row; V2: handoff by slot.
        self._rows: dict[int, tuple[bytes, list[int]]] = {}
        self._slots: dict[int, bytes] = {}
        # A draft's tokens have rows of their own.
        PENDING_FIRST_TOKENS.has_processor = vllm_config.speculative_config is None

    def is_argmax_invariant(self) -> bool:
        """It decides what is sampled, also greedily."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """V1: follows the rows of consuming requests that have no output."""
        process_dict_updates(self._rows, batch_update, _consuming_row)
        for row in [row for row, (_, output_ids) in self._rows.items() if output_ids]:
            del self._rows[row]

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """V2: follows the slot of a consuming request."""
        handoff = consumed_handoff(sampling_params)
        if handoff is None:
            self._slots.pop(req_idx, None)
            return False
        self._slots[req_idx] = handoff
        return True

    def apply(self, logits: torch.Tensor, ctx: LogitsContext | None = None) -> torch.Tensor:
        """Forces what is due.

        Args:
            logits: `[num_rows, vocab_size]`, changed in place.
            ctx: V2: this step's batch.
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
    """The handoff that a request consumes, by its parameters; anybody could have sent them."""
    outer = (params.extra_args or {}).get("kv_transfer_params")
    ours = outer.get("kvpipe") if isinstance(outer, dict) else None
    if not isinstance(ours, dict) or ours.get("role") != "consume":
        return None
    try:
        return parse_handoff(ours.get("handoff"))
    except ConfigError:
        return None
