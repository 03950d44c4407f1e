"""Requests that only one of P and D can serve, found before P computes their prompt.

P gets the client's request with other limits (`prefill_body`), so it accepts what D refuses: D alone then answers, and
its refusal is the client's answer. P's limits are not the client's: a prompt that is too long for P goes to D alone.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

import orjson

from kvpipe.proxy.bodies import CHAT_PATH, written
from kvpipe.proxy.descriptions import Descriptions
from kvpipe.proxy.exchanges import Call
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.upstream import InstanceError, Role, Upstream

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


@dataclass(frozen=True, slots=True)
class Fit:
    """The instances whose models have room for a request.

    Attributes:
        prefill: P's that have; none where D has to answer alone.
        decode: D's that have; all of them if none has, because D's refusal is the answer then.
        alone: reason for which D has to answer alone; empty if there is none.
    """

    prefill: Sequence[Instance]
    decode: Sequence[Instance]
    alone: Literal["", "too_long", "exceeds_prefill"] = ""


class LengthCheck:
    """Tells which instances have room for a request. A tokenizer is asked only where the answer depends on it.

    Args:
        upstream: HTTP client of the instances.
        limits: descriptions of engines with `max_model_len`, by control address where an instance has one.
        models: the same by URL, for instances without a control address.
        timeout_s: limit for the tokenizer; without its answer the request counts as short enough.
    """

    def __init__(self, upstream: Upstream, limits: Descriptions, models: Descriptions, timeout_s: float) -> None:
        self._upstream = upstream
        self._limits = limits
        self._models = models
        self._timeout_s = timeout_s

    async def fit(self, call: Call, prefill: Sequence[Instance], decode: Sequence[Instance]) -> Fit:
        """The instances that a request can be sent to, in their order; one whose limit is not known has room."""
        num_output = output_limit(call.body, call.path) or 1
        exceeds_at = {("prefill", it): self._exceeds(call, it, 1) for it in prefill}
        exceeds_at |= {("decode", it): self._exceeds(call, it, num_output) for it in decode}
        if None in exceeds_at.values():
            num_prompt_tokens = await self._tokenized(call, prefill, decode)
            for (role, instance), is_known in exceeds_at.items():
                if is_known is None:
                    num_tokens = (num_prompt_tokens or 0) + (1 if role == "prefill" else num_output)
                    exceeds_at[role, instance] = num_tokens > (self._limit_of(instance) or num_tokens)
        fit = Fit(
            [it for it in prefill if not exceeds_at["prefill", it]],
            [it for it in decode if not exceeds_at["decode", it]],
        )
        if not fit.decode:
            return Fit((), decode, "too_long")
        return fit if fit.prefill else Fit((), fit.decode, "exceeds_prefill")

    async def decode_alone(self, call: Call, decode: Sequence[Instance]) -> Sequence[Instance]:
        """The D's that a completion or a chat without a handoff can be sent to; all of them if none has room."""
        has_one_limit = len({self._limit_of(instance) for instance in decode}) == 1
        return decode if has_one_limit else (await self.fit(call, (), decode)).decode

    def _exceeds(self, call: Call, instance: Instance, num_output: int) -> bool | None:
        limit = self._limit_of(instance)
        return limit is not None and exceeds(call.body, call.num_bytes, num_output, limit)

    def _limit_of(self, instance: Instance) -> int | None:
        known = self._limits.of(instance.control) if instance.control else self._models.of(instance.url)
        limit = (known or {}).get("max_model_len")
        return limit if type(limit) is int else None

    async def _tokenized(self, call: Call, prefill: Sequence[Instance], decode: Sequence[Instance]) -> int | None:
        """The tokens of the prompt, by D's tokenizer, or by P's where D is behind a broker."""
        role: Role = "decode" if "://" in decode[0].url else "prefill"
        instance = decode[0] if role == "decode" else prefill[0]
        try:
            async with asyncio.timeout(self._timeout_s):
                body = tokenize_body(call.body)
                answer = await self._upstream.post(role, instance, "/tokenize", call.headers, body)
        except (InstanceError, TimeoutError):
            return None
        return num_tokens(answer.body) if answer.status == HTTPStatus.OK else None


def output_limit(body: dict[str, Any], path: str) -> int | None:
    """The most tokens that the client wants; None if the request does not say it as a number."""
    limit = body.get("max_completion_tokens") if path == CHAT_PATH else None
    limit = body.get("max_tokens") if limit is None else limit
    return limit if type(limit) is int else None


def is_contradictory(body: dict[str, Any], path: str) -> bool:
    """True if D may refuse fields that P does not get as they are: wrong types, or values that exclude others.

    In doubt D works alone, which is always correct, only slower.
    """
    numbers = [(name, 1) for name in ("max_tokens", "max_completion_tokens") if name in body] + [("min_tokens", 0)]
    if any(not _is_number(body.get(name), least) for name, least in numbers):
        return True
    if body.get("stream") not in (None, True, False) or (body.get("stream_options") and body.get("stream") is not True):
        return True
    limit = output_limit(body, path)
    return limit is not None and (body.get("min_tokens") or 0) > limit


def exceeds(body: dict[str, Any], num_bytes: int, num_output: int, max_model_len: int) -> bool | None:
    """True if prompt and output are longer than a model's context; None if only its tokenizer can say.

    A token stands for at least one byte. Images and audio are not counted.
    """
    if body.get("truncate_prompt_tokens") is not None:
        return num_output > max_model_len
    prompt = token_ids(body.get("prompt"))
    if prompt is not None:
        return len(prompt) + num_output > max_model_len
    if num_output >= max_model_len:
        return True
    return None if num_bytes + _TEMPLATE_TOKENS + num_output > max_model_len else False


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
