"""Requests that only D would refuse, found before P computes their prompt.

P gets the client's request with other limits (`prefill_body`), so it accepts what D refuses. D alone then answers: its
refusal is the client's answer.
"""

import asyncio
from http import HTTPStatus
from typing import Any

import orjson

from kvpipe.proxy.bodies import CHAT_PATH, written
from kvpipe.proxy.descriptions import Descriptions
from kvpipe.proxy.exchanges import Call
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.upstream import InstanceError, Upstream

# vLLM's fields of `/tokenize`; the others of a request do not change its number of tokens.
_TOKENIZED_FIELDS = (
    "model",
    "prompt",
    "messages",
    "tools",
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "chat_template_kwargs",
    "media_io_kwargs",
    "mm_processor_kwargs",
)
# Tokens of a chat template or a tokenizer that no byte of the request stands for.
_TEMPLATE_TOKENS = 64


class LengthCheck:
    """Tells whether a request is too long for a D's model; only for one that may be, D's tokenizer is asked.

    Args:
        upstream: HTTP client of the instances.
        descriptions: descriptions of D's engines, with the length of the model's context.
        timeout_s: limit for D's answer; without one the request counts as short enough.
    """

    def __init__(self, upstream: Upstream, descriptions: Descriptions, timeout_s: float) -> None:
        self._upstream = upstream
        self._descriptions = descriptions
        self._timeout_s = timeout_s

    async def is_too_long(self, call: Call, decode: Instance) -> bool:
        """Whether D would refuse the request for its length; False where that is not known."""
        max_model_len = (self._descriptions.of(decode.control) or {}).get("max_model_len")
        if type(max_model_len) is not int:
            return False
        is_known = exceeds(call.body, call.path, call.num_bytes, max_model_len)
        if is_known is not None:
            return is_known
        num_prompt_tokens = await self._tokenized(call, decode)
        return (
            num_prompt_tokens is not None
            and num_prompt_tokens + (output_limit(call.body, call.path) or 0) > max_model_len
        )

    async def _tokenized(self, call: Call, decode: Instance) -> int | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                body = tokenize_body(call.body)
                answer = await self._upstream.post("decode", decode, "/tokenize", call.headers, body)
        except (InstanceError, TimeoutError):
            return None
        return num_tokens(answer.body) if answer.status == HTTPStatus.OK else None


def output_limit(body: dict[str, Any], path: str) -> int | None:
    """The most tokens that the client wants; None if the request does not say it as a number."""
    limit = body.get("max_completion_tokens") if path == CHAT_PATH else None
    limit = body.get("max_tokens") if limit is None else limit
    return limit if type(limit) is int else None


def is_contradictory(body: dict[str, Any], path: str) -> bool:
    """Whether fields that P does not get as they are may be refused by D: wrong types, or values that exclude others.

    In doubt D works alone, which is always correct, only slower.
    """
    numbers = [(name, 1) for name in ("max_tokens", "max_completion_tokens") if name in body] + [("min_tokens", 0)]
    if any(not _is_number(body.get(name), least) for name, least in numbers):
        return True
    if body.get("stream") not in (None, True, False) or (body.get("stream_options") and body.get("stream") is not True):
        return True
    limit = output_limit(body, path)
    return limit is not None and (body.get("min_tokens") or 0) > limit


def exceeds(body: dict[str, Any], path: str, num_bytes: int, max_model_len: int) -> bool | None:
    """Whether prompt and output are longer than a model's context; None if only its tokenizer can say.

    A token stands for at least one byte. Images and audio are not counted.
    """
    limit = output_limit(body, path) or 0
    if body.get("truncate_prompt_tokens") is not None:
        return limit > max_model_len
    prompt = token_ids(body.get("prompt"))
    if prompt is not None:
        return len(prompt) + limit > max_model_len
    if limit >= max_model_len:
        return True
    return None if num_bytes + _TEMPLATE_TOKENS + limit > max_model_len else False


def tokenize_body(body: dict[str, Any]) -> bytes:
    """Body that asks an instance how many tokens the prompt has."""
    return written({name: body[name] for name in _TOKENIZED_FIELDS if name in body})


def num_tokens(answer: bytes) -> int | None:
    """The number of tokens in an instance's answer to `tokenize_body`; None if it has none."""
    try:
        count = orjson.loads(answer)["count"]
    except (orjson.JSONDecodeError, LookupError, TypeError):
        return None
    return count if type(count) is int else None


def token_ids(prompt: object) -> list[int] | None:
    """The prompt as token ids, alone or as the only one of a batch; None if it is text."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    return prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], int) else None


def _is_number(value: object, least: int) -> bool:
    return value is None or (type(value) is int and value >= least)
