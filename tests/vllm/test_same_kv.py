"""What `versions.py` says of several versions of vLLM at once: their KV is the same. Each version runs these tests."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kvpipe.vllm.fingerprint import _hash_json

pytestmark = pytest.mark.vllm

BASE = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
LLAMA_3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 256}
# The hash of each configuration, as vLLM 0.30 to 0.33 read it with transformers 5.10.4, 5.19.0 and 5.20.0.
CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {}, "39604880d470c268"),
    ("llama", {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA_3}}, "82032a717b3fca86"),
    ("mistral", {"sliding_window": None, "rope_theta": 1e6}, "c74bff73ab3e47e9"),
    (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 256, "max_window_layers": 2, "rope_theta": 1e6},
        "55f1f1ef0e705493",
    ),
    (
        "qwen3",
        {
            "head_dim": 32,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": 2,
            "rope_theta": 1e6,
            "attention_bias": False,
        },
        "a753ecb9fa848298",
    ),
]
NUM_BLOCKS, NUM_HEADS, BLOCK, HEAD_SIZE = 3, 2, 64, 64


@pytest.mark.parametrize(("kind", "more", "expected"), CONFIGS)
def test_each_vllm_reads_the_configuration_of_a_compared_model_alike(
    tmp_path: Path, kind: str, more: dict[str, Any], expected: str
) -> None:
    from vllm.transformers_utils.config import get_config  # noqa: PLC0415 - vLLM, if it is there

    architecture = f"{kind.capitalize()}ForCausalLM"
    written = {"architectures": [architecture], "model_type": kind, "transformers_version": "4.50.0", **BASE, **more}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = get_config(str(tmp_path), trust_remote_code=False)
    assert _hash_json(config.to_dict()) == expected


def as_vectors(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks `[tokens, head_size]` as the kernels for vectors have them: keys by dimension, values by token."""
    return keys.transpose(-1, -2), values


def as_tiles(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for AMX: keys of 16 tokens by pairs of dimensions, values of 16 dimensions by pairs of tokens."""
    keys = keys.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 16)).transpose(-2, -3)
    return keys, values.unflatten(-1, (-1, 16)).unflatten(-3, (-1, 2)).movedim(-2, -4).transpose(-1, -2)


@pytest.mark.parametrize(
    ("isa", "dtype", "arranged"),
    [
        *(("vec", dtype, as_vectors) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *(("vec16", dtype, as_vectors) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        ("amx", torch.bfloat16, as_tiles),
    ],
)
def test_each_cpu_build_writes_the_same_bytes_of_a_block(isa: str, dtype: torch.dtype, arranged: Any) -> None:
    from vllm import _custom_ops as ops  # noqa: PLC0415 - vLLM, if it is there
    from vllm.platforms import current_platform  # noqa: PLC0415

    current_platform.import_kernels()
    if isa == "amx" and not torch.cpu._is_avx512_supported():
        pytest.skip("this processor has no AVX-512, for which AMX is built")
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    shape = NUM_BLOCKS * BLOCK, NUM_HEADS, HEAD_SIZE
    count = NUM_BLOCKS * BLOCK * NUM_HEADS * HEAD_SIZE
    keys = (torch.arange(count) % (1 << 15)).to(bits).view(shape)
    values = keys.flip(0)
    cache = torch.zeros(NUM_BLOCKS, NUM_HEADS, 2 * BLOCK, HEAD_SIZE, dtype=dtype)
    slots = torch.arange(NUM_BLOCKS * BLOCK)
    halves = cache.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(keys.view(dtype), values.contiguous().view(dtype), *halves, slots, isa)
    blocks = [each.unflatten(0, (NUM_BLOCKS, BLOCK)).transpose(1, 2) for each in (keys, values)]
    expected = [each.reshape(NUM_BLOCKS, NUM_HEADS, -1) for each in arranged(*blocks)]
    written = [half.reshape(NUM_BLOCKS, NUM_HEADS, -1).view(bits) for half in halves]
    assert torch.equal(written[0], expected[0])
    assert torch.equal(written[1], expected[1])
