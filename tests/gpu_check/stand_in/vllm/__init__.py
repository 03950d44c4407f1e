"""Stand-in for vLLM in one process: the engine, its settings and its answers."""

import os
from types import SimpleNamespace

from stand_in_tokens import following


class SamplingParams:
    def __init__(self, temperature, max_tokens, ignore_eos):
        self.max_tokens = max_tokens


class LLM:
    @classmethod
    def from_engine_args(cls, given):
        engine = cls()
        is_v2 = os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
        config = SimpleNamespace(
            use_v2_model_runner=is_v2,
            scheduler_config=SimpleNamespace(async_scheduling=is_v2),
            attention_config=SimpleNamespace(backend="STAND_IN"),
        )
        engine.llm_engine = SimpleNamespace(vllm_config=config)
        return engine

    def generate(self, prompts, sampling, use_tqdm):
        answers = [following(prompt["prompt_token_ids"], sampling.max_tokens) for prompt in prompts]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)]) for answer in answers]
