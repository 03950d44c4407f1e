"""Makes a tiny Llama with random weights: 4 layers, a vocabulary of 2048, 4 KV heads of 32.

Nothing is downloaded: the tokenizer is trained on the standard library's sources. The weights are spread wide
(`initializer_range` 0.12), so that each output token depends strongly on the whole context; with the usual 0.02 nearly
every prompt gets the same answer, and a wrong KV cache would go unseen.
"""

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvpipe.exceptions import ConfigError

# Written beside the model; a model made by another recipe is made anew.
RECIPE = "tiny-llama 1"
RECIPE_FILE = "recipe.txt"

VOCAB_SIZE = 2048
MAX_POSITIONS = 8192
SPECIAL_TOKENS = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '</s>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def cached_path() -> Path:
    """Returns the user's folder for the model, in `XDG_CACHE_HOME`, or else in `~/.cache`."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "kvpipe" / "tiny-model"


def make_tiny_model(path: Path) -> Path:
    """Makes the model in `path` unless it is there already, and returns the absolute path.

    The folder appears whole or not at all: it is written beside its place and renamed.

    Raises:
        ConfigError: The folder cannot be written, or has something else.
    """
    path = path.resolve()
    if _is_made(path):
        return path
    if path.exists() and not (path / RECIPE_FILE).exists():
        raise ConfigError(f"{path} exists and is no tiny model: name a model, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise ConfigError(f"cannot make a model in {path}: {error.strerror}; name a model") from error
    try:
        _write_tokenizer(scratch)
        _write_weights(scratch)
        (scratch / RECIPE_FILE).write_text(RECIPE + "\n")
        _move_into_place(scratch, path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _is_made(path: Path) -> bool:
    try:
        return (path / RECIPE_FILE).read_text().strip() == RECIPE
    except OSError:
        return False


def _move_into_place(scratch: Path, path: Path) -> None:
    scratch.chmod(0o755)
    if path.exists():
        shutil.rmtree(path)
    try:
        scratch.rename(path)
    except OSError:
        if not _is_made(path):  # else another process was faster, and made the same
            raise


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: PLC0415 - only to make one
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_standard_library(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",  # noqa: S106 - not a password
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        model_max_length=MAX_POSITIONS,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)


def _standard_library() -> Iterator[str]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    for source in sorted(folder.glob("*.py")):
        yield source.read_text(encoding="utf-8", errors="replace")


def _write_weights(folder: Path) -> None:
    import torch  # noqa: PLC0415 - only to make one
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    torch.manual_seed(0)
    config: Any = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        initializer_range=0.12,
        bos_token_id=SPECIAL_TOKENS.index("<s>"),
        eos_token_id=SPECIAL_TOKENS.index("</s>"),
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
