"""Chunks of a vLLM stream: the token ids in them, and what of them a client gets who has not asked for ids. Pure."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import orjson

from kvpipe.proxy.bodies import error_in_first_event

_EVENT = b"data:"
_SHOWN_BYTES = 200
_TOKEN_FIELDS = ("token_ids", "prompt_token_ids")


def chunk_of(event: bytes) -> dict[str, Any] | None:
    """Parses an event; `None` if it is no chunk, as the end mark."""
    try:
        chunk = orjson.loads(event.strip().removeprefix(_EVENT))
    except orjson.JSONDecodeError:
        return None
    choices = chunk.get("choices") if isinstance(chunk, dict) else None
    return chunk if isinstance(choices, list) and all(isinstance(choice, dict) for choice in choices) else None


def failure_in(event: bytes) -> str:
    """Reason of D for breaking off with this event; empty if it does not, or the fault is the request's.

    vLLM ends a stream in order also where its engine has died.
    """
    error = error_in_first_event(event)
    if error is None or error[0] < HTTPStatus.INTERNAL_SERVER_ERROR:
        return ""
    return f"broke off with {error[1][:_SHOWN_BYTES].decode(errors='replace')}"


def event_of(chunk: dict[str, Any]) -> bytes:
    """Writes a chunk as an event."""
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def tokens_of(chunk: dict[str, Any]) -> tuple[int, ...]:
    """The token ids in a chunk."""
    return tuple(token for choice in chunk["choices"] for token in choice.get("token_ids") or ())


def without_tokens(chunk: dict[str, Any]) -> dict[str, Any]:
    """The chunk as a client gets it who has not asked for token ids."""
    choices = [{key: choice[key] for key in choice if key not in _TOKEN_FIELDS} for choice in chunk["choices"]]
    return {key: value for key, value in chunk.items() if key not in _TOKEN_FIELDS} | {"choices": choices}


def is_end_mark(event: bytes) -> bool:
    """True if an event is the last one of a stream."""
    return event.strip().removeprefix(_EVENT).strip() == b"[DONE]"


def is_finish(chunk: dict[str, Any]) -> bool:
    """True if a chunk ends a sequence."""
    return any(choice.get("finish_reason") is not None for choice in chunk["choices"])


def has_more(chunk: dict[str, Any]) -> bool:
    """True if a chunk has something of each token besides its text."""
    return any(choice.get("token_ids") or choice.get("logprobs") is not None for choice in chunk["choices"])


def is_empty(chunk: dict[str, Any]) -> bool:
    """True if a chunk has no output: nothing, or the role of a chat's message."""
    choices = chunk["choices"]
    return bool(choices) and not is_finish(chunk) and not any(_message(choice).keys() - {"role"} for choice in choices)


def is_for_tokens(chunk: dict[str, Any]) -> bool:
    """True if a chunk of a chat exists for its token ids alone: vLLM sends it only to those who ask for them."""
    choices = chunk["choices"]
    return (
        is_empty(chunk)
        and all(choice.get("delta") == {} and choice.get("logprobs") is None for choice in choices)
        and not chunk.get("usage")
    )


def text_of(chunk: dict[str, Any]) -> str | None:
    """The plain text in a chunk; `None` if it has anything else, such as reasoning or a call of a tool."""
    texts = []
    for choice in chunk["choices"]:
        message = _message(choice)
        if message.keys() - {"content", "text", "role"}:
            return None
        texts.append(message.get("content") or message.get("text") or "")
    return "".join(texts)


def without_text(chunk: dict[str, Any], num_chars: int) -> dict[str, Any]:
    """A chunk of one sequence without the beginning of its text."""
    [choice] = chunk["choices"]
    field = "text" if "text" in choice else "content"
    holder = choice if "text" in choice else choice["delta"]
    holder[field] = (holder.get(field) or "")[num_chars:]
    return chunk


def _message(choice: dict[str, Any]) -> dict[str, Any]:
    """The message of a choice, without empty fields."""
    delta = choice.get("delta")
    message = delta if isinstance(delta, dict) else {"text": choice.get("text")}
    return {key: value for key, value in message.items() if value not in (None, "", [])}
