"""The model of the benchmarks: 16 layers, 16 KV heads of 64, random weights made by vLLM."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

VOCAB_SIZE = 2048
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 16, 16, 64
MAX_TOKENS = 8192
_RESERVED_TOKENS = 10
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}
_SHOWN_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def write_model(folder: Path, num_layers: int = NUM_LAYERS, **shape: Any) -> None:
    """Writes configuration and tokenizer. vLLM makes the weights from a seed (`--load-format dummy`).

    Args:
        folder: Where to.
        num_layers: Number of layers.
        shape: Fields of `LlamaConfig` that differ from those of the benchmarks' model.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: PLC0415 - installed with vLLM
    from transformers import LlamaConfig, PreTrainedTokenizerFast  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": NUM_KV_HEADS * HEAD_DIM,
        "intermediate_size": 2 * NUM_KV_HEADS * HEAD_DIM,
        "num_attention_heads": NUM_KV_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "tie_word_embeddings": False,
        **shape,
    }
    vocab = {f"w{number}": number for number in range(fields["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))  # noqa: S106 - not a password
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", bos_token="w1", eos_token="w2")  # noqa: S106
    wrapped.save_pretrained(folder)
    config = LlamaConfig(
        num_hidden_layers=num_layers, max_position_embeddings=MAX_TOKENS, bos_token_id=1, eos_token_id=2, **fields
    )
    config.architectures = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config.to_dict()))


def random_prompt(num_tokens: int, seed: str) -> list[int]:
    """Token ids that are in no prefix cache."""
    draw = random.Random(seed)  # noqa: S311 - a prompt is no secret
    return draw.choices(range(_RESERVED_TOKENS, VOCAB_SIZE), k=num_tokens)


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """CPU flags that affect the speed of a matrix product."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return [flag for flag in _SHOWN_FLAGS if flag in flags]


def dtype() -> str:
    """bfloat16 if the CPU has instructions for it; without them it is several times slower than float32."""
    return "bfloat16" if _BF16_FLAGS.intersection(cpu_flags()) else "float32"


def weight_bytes(num_layers: int = NUM_LAYERS) -> int:
    """Bytes of the weights: attention and MLP of each layer, and two embeddings."""
    hidden = NUM_KV_HEADS * HEAD_DIM
    num_weights = num_layers * (4 * hidden**2 + 3 * hidden * 2 * hidden) + 2 * VOCAB_SIZE * hidden
    return num_weights * _value_bytes()


def kv_bytes_per_token(num_layers: int = NUM_LAYERS) -> int:
    """Bytes of KV for a token: keys and values of all layers."""
    return 2 * num_layers * NUM_KV_HEADS * HEAD_DIM * _value_bytes()


def _value_bytes() -> int:
    return 2 if dtype() == "bfloat16" else 4
