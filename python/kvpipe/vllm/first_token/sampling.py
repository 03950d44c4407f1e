"""Settings that a first token depends on besides its prompt: the producer's is forced only if it was sampled alike."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from kvpipe.vllm.versions import is_watermarked

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

# Of vLLM's sampling parameters. It compiles those with an underscore itself, from others.
_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "thinking_token_budget", "trace_decode_token_ids"),
)


class Sampling:
    """Sampling of first tokens by one engine."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        structured = vllm_config.structured_outputs_config
        self._config = vllm_config
        self._processors = [str(processor) for processor in vllm_config.model_config.logits_processors or ()]
        # With a reasoning parser the first token is not constrained yet.
        self._structured = (str(structured.reasoning_parser or ""), structured.enable_in_reasoning)

    def hash(self, request: Request) -> bytes:
        """Hashes what the first token of a request depends on.

        The requests of one handoff may differ in it: a router may change or drop parameters for the producer, and of a
        request with a seed and n > 1 each child has a seed of its own.
        """
        params = request.sampling_params
        if params is None:
            return bytes(32)
        fields: list[Any] = [self._processors, *(getattr(params, name) for name in _FIELDS)]
        fields.append(is_watermarked(self._config, params))
        fields.append({key: value for key, value in (params.extra_args or {}).items() if key != "kv_transfer_params"})
        # While there are fewer tokens than `min_tokens`, none that stops the request is sampled.
        fields.append(sorted(params.all_stop_token_ids) if params.min_tokens else None)
        if params.structured_outputs is not None:
            public = {key: value for key, value in vars(params.structured_outputs).items() if key[0] != "_"}
            fields += [self._structured, public]
        return hashlib.sha256(repr(fields).encode()).digest()
