"""Conditions under which this engine forces the first outputs of a request; otherwise it samples its own."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

# vLLM's name of a request for one of `n` choices. A seed is another one for each of them.
_OF_SEVERAL_CHOICES = re.compile(r"\d+_")


class FirstTokenSupport:
    """Conditions under which one engine forces first tokens.

    Attributes:
        is_speculative: True if the engine decodes speculatively.
        are_workers_ready: True if all ranks have the logits processor; they report that after their start.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.is_speculative = vllm_config.speculative_config is not None
        self._vocab_size = int(vllm_config.model_config.get_vocab_size())
        self._logprobs_mode = str(vllm_config.model_config.logprobs_mode)
        self.are_workers_ready = False

    def is_supported(self) -> bool:
        """True if this engine can force first tokens at all."""
        return self.are_workers_ready and not self.is_speculative

    def unsupported_reason(self, request: Request) -> str:
        """Reason for which the first token of a request cannot be forced; empty if it can."""
        params = request.sampling_params
        if self.is_speculative:
            return "speculative decoding"
        if _OF_SEVERAL_CHOICES.match(request.request_id):
            return "it is one of several choices (n > 1), and the producer's may be of another"
        if not self.are_workers_ready:
            return "vLLM did not load kvpipe's logits processor"
        if params is not None and params.prompt_logprobs is not None:
            return "prompt logprobs"
        if params is not None and params.num_logprobs is not None and self._logprobs_mode.startswith("processed"):
            return f"logprobs in mode {self._logprobs_mode} would be those of a masked distribution"
        return ""

    def refusal(self, tokens: Iterable[int]) -> str:
        """Reason for which the first outputs of a request cannot be these tokens; empty if they can."""
        for token in tokens:
            # An index outside the vocabulary would crash the sampler, and the engine with it.
            if not 0 <= token < self._vocab_size:
                return f"token {token} is outside the vocabulary of {self._vocab_size}"
        return ""
