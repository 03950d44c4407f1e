"""Estimates the tokens of prompts from their bytes, by what answers say about earlier ones. Pure: no input or output.

A wrong estimate costs time and nothing else: decode alone and a handoff give the same answer.
"""

from collections import OrderedDict
from typing import Any

from kvpipe.proxy.bodies import CHAT_PATH, written
from kvpipe.proxy.limits import token_ids

# Models that clients have named and that have answered.
_MAX_MODELS = 64
# Until a model's first answer. English text has about so many.
_USUAL_BYTES_PER_TOKEN = 4.0
# A prompt counts by this share after each later one: the ratio is that of about the last 50 prompts, by their length.
_KEPT = 0.98


class PromptLengths:
    """Tells the number of tokens of prompts, and learns the bytes per token of each model."""

    def __init__(self, max_models: int = _MAX_MODELS) -> None:
        self._max_models = max_models
        # Running sums of bytes and tokens by model; the model that was used last is the last one.
        self._sums: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sums)

    def tokens(self, body: dict[str, Any], path: str) -> float | None:
        """Tokens of a request's prompt: counted where it has token ids, otherwise estimated; None if neither can be."""
        ids = None if path == CHAT_PATH else token_ids(body.get("prompt"))
        if ids is not None:
            return len(ids)
        num_bytes = _text_bytes(body, path)
        return None if num_bytes is None else num_bytes / self._bytes_per_token(body)

    def learn(self, body: dict[str, Any], path: str, num_tokens: int) -> None:
        """Learn from an answer's number of prompt tokens."""
        num_bytes = _text_bytes(body, path)
        if not num_bytes or num_tokens < 1:
            return
        model = str(body.get("model"))
        sum_bytes, sum_tokens = self._sums.get(model, (0.0, 0.0))
        self._sums[model] = (sum_bytes * _KEPT + num_bytes, sum_tokens * _KEPT + num_tokens)
        self._sums.move_to_end(model)
        if len(self._sums) > self._max_models:
            self._sums.popitem(last=False)

    def _bytes_per_token(self, body: dict[str, Any]) -> float:
        sums = self._sums.get(str(body.get("model")))
        return _USUAL_BYTES_PER_TOKEN if sums is None else sums[0] / sums[1]


def _text_bytes(body: dict[str, Any], path: str) -> int | None:
    """Bytes of a prompt of text; None where they do not stand for its tokens.

    Those of a chat are the JSON of messages and tools, whose keys are about what a chat template adds.
    """
    if body.get("truncate_prompt_tokens") is not None:
        return None
    if path == CHAT_PATH:
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(map(_is_text, messages)):
            return None
        return len(written({name: body[name] for name in ("messages", "tools") if name in body}))
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    return len(prompt.encode()) if isinstance(prompt, str) else None


def _is_text(message: object) -> bool:
    """True if a message has no image, audio or the like, whose tokens its bytes do not tell."""
    content = message.get("content") if isinstance(message, dict) else None
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return isinstance(message, dict)
