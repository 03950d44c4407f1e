"""Tiny models with random weights of the kinds whose KV cache groups differ, made on the spot.

Weights are spread wide as in `examples/disagg_prefill/tiny_model.py`, so that each token depends on the whole context.
Windows are of two blocks, so that prompts are several windows long.
"""

import shutil
from pathlib import Path
from typing import Any

BLOCK = 32
WINDOW = 64
PLAIN: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
ATTENTION: dict[str, Any] = {
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2


def gemma3(transformers: Any, **shape: Any) -> Any:
    """Sliding windows, and full attention. `shape` replaces fields."""
    fields = {"sliding_window": WINDOW, "layer_types": ALTERNATING, "query_pre_attn_scalar": 32}
    return transformers.Gemma3TextConfig(**PLAIN | ATTENTION | fields | shape)


def _gpt_oss(transformers: Any) -> Any:
    return transformers.GptOssConfig(
        **PLAIN,
        **ATTENTION,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        num_local_experts=4,
        num_experts_per_tok=2,
    )


def _deepseek_v2(transformers: Any) -> Any:
    return transformers.DeepseekV2Config(
        **PLAIN,
        **ATTENTION | {"num_key_value_heads": 4},
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
    )


def _mamba2(transformers: Any) -> Any:
    return transformers.Mamba2Config(
        **PLAIN, num_hidden_layers=4, num_heads=8, head_dim=32, state_size=32, n_groups=1, expand=2, chunk_size=32
    )


def qwen3_next(transformers: Any, **shape: Any) -> Any:
    """Recurrent states, and full attention. `shape` replaces fields."""
    fields = {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    return transformers.Qwen3NextConfig(**PLAIN | ATTENTION | fields | shape)


KINDS = {
    "gemma3": gemma3,
    "gpt-oss": _gpt_oss,
    "deepseek-v2": _deepseek_v2,
    "mamba2": _mamba2,
    "qwen3-next": qwen3_next,
}


def make_model(kind: str, folder: Path, tokenizer: Path) -> Path:
    """Makes a model in a new folder, with the tokenizer of another one."""
    # Importing it fixes where models are looked for, which other tests choose.
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    torch.manual_seed(0)
    config = KINDS[kind](transformers)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder / name)
    return folder
