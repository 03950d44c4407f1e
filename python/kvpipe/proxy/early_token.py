"""The early token: the proxy sends P's token to the client before D's stream begins, then continues with D's stream.

D's stream is matched by text, not by chunks: the proxy forwards the text that follows the early token. Pure: no input
or output, no clock.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import orjson

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.bodies import CHAT_PATH
from kvpipe.proxy.events import Events

# Fields that change the chunk of a token, or delay it, in a way that only the instance knows.
_INSTANCE_FIELDS = (
    "stop",
    "logprobs",
    "tools",
    "functions",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_token_offsets",
)


# An event has the text of one step; nothing of it goes to the client before its end.
_MAX_EVENT_BYTES = 16 << 20


class ContradictionError(KVPipeError):
    """D's stream does not begin with the early token, or cannot go on after it."""


def allows_early_token(body: dict[str, Any]) -> bool:
    """True if the proxy may send P's token to the client of this request before D's stream begins."""
    options = body.get("stream_options")
    has_usage_in_chunks = isinstance(options, dict) and bool(options.get("continuous_usage_stats"))
    is_plain = not any(_is_set(body.get(field)) for field in _INSTANCE_FIELDS)
    return body.get("stream") is True and not has_usage_in_chunks and is_plain


def repeats_first_token(described: dict[str, Any] | None, path: str) -> bool:
    """True if a D, by its description, begins its stream with P's token unchanged; a reasoning parser may split it."""
    if described is None or described.get("forces_first_tokens") is not True:
        return False
    return path != CHAT_PATH or not described.get("reasoning_parser")


def _is_set(value: Any) -> bool:
    """True if a field requests something; `logprobs: 0` does."""
    return value is not None and value is not False and value not in ("", [])


@dataclass(frozen=True, slots=True)
class EarlyToken:
    """The first token in P's answer.

    Attributes:
        token: token id.
        text: text of the token; it may be empty in a chat.
        role: role of a chat message.
        head: the fields that every chunk of the response has: id, created, model, object.
    """

    token: int
    text: str
    role: str
    head: dict[str, Any]

    @classmethod
    def of(cls, path: str, parsed: dict[str, Any]) -> Self | None:
        """Read P's parsed answer; None if its token cannot be sent alone.

        These are: text that ends within a character, text that a parser has split, a token that ends the request, and
        an answer without a token, because P has withdrawn the handoff.
        """
        try:
            choice = parsed["choices"][0]
            token = parsed["kv_transfer_params"]["kvpipe"]["first_token"]
            message = choice["message"] if path == CHAT_PATH else choice
            text = message["content"] if path == CHAT_PATH else message["text"]
            kind = "chat.completion.chunk" if path == CHAT_PATH else "text_completion"
            head = {"id": parsed["id"], "object": kind, "created": parsed["created"], "model": parsed["model"]}
        except (LookupError, TypeError):
            return None
        is_split = any(message.get(field) for field in ("reasoning", "reasoning_content", "tool_calls"))
        if type(token) is not int or not isinstance(text, str) or is_split:
            return None
        if choice.get("finish_reason") != "length" or text.endswith("\ufffd"):
            return None
        if path != CHAT_PATH and not text:
            return None
        return cls(token, text, str(message.get("role") or "assistant"), head)

    def events(self) -> bytes:
        """Events with the token for the client."""
        if self.head["object"] == "text_completion":
            return self._event({"text": self.text})
        role = self._event({"delta": {"role": self.role, "content": ""}})
        return role + (self._event({"delta": {"content": self.text}}) if self.text else b"")

    def _event(self, message: dict[str, Any]) -> bytes:
        choice = {"index": 0, **message, "logprobs": None, "finish_reason": None}
        return _written(self.head | {"choices": [choice]})


class Continuation:
    """D's stream after the early token."""

    def __init__(self, token: EarlyToken) -> None:
        self._head = {name: token.head[name] for name in ("id", "created")}
        self._missing = token.text
        self._is_chat = token.head["object"] != "text_completion"
        self._events = Events()
        self.has_sent = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yields events for the client that a piece of D's stream completes.

        Raises:
            ContradictionError: D's stream does not begin with the early token, and nothing of it was forwarded; or an
                event is too large.
        """
        for event in self._events.feed(piece):
            if (continued := self._continued(event)) is not None:
                self.has_sent = True
                yield continued
        if self._events.num_bytes_left > _MAX_EVENT_BYTES:
            raise ContradictionError(f"decode sent an event of more than {_MAX_EVENT_BYTES} bytes")

    def end(self) -> bytes:
        """Returns an incomplete event at the end of D's stream.

        Raises:
            ContradictionError: the stream ended before the end of the early token.
        """
        if self._missing:
            raise ContradictionError(f"decode ended without {self._missing!r}, which prefill had sampled")
        return self._events.end()

    def _continued(self, event: bytes) -> bytes | None:
        data = event.strip().removeprefix(b"data:").strip()
        chunk = _parsed(data)
        choices = chunk.get("choices") or []
        if not self._is_well_formed(choices):
            if self._missing:
                raise ContradictionError(f"decode sent {data[:200]!r}, which is no chunk of this API")
            return event + b"\n\n"
        has_content = not choices
        for choice in choices:
            has_content |= self._strip(choice)
        if not has_content:
            return None
        if self._missing:
            raise ContradictionError(f"decode sent {data[:200]!r} before {self._missing!r}, which prefill had sampled")
        return _written(chunk | self._head) if "choices" in chunk else event + b"\n\n"

    def _is_well_formed(self, choices: object) -> bool:
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            return False
        messages = [(choice.get("delta") or {}) if self._is_chat else choice for choice in choices]
        field = "content" if self._is_chat else "text"
        return all(isinstance(message, dict) and isinstance(message.get(field) or "", str) for message in messages)

    def _strip(self, choice: dict[str, Any]) -> bool:
        """Remove the early token from a choice. Returns true if anything else is left."""
        message, field = (choice.get("delta") or {}, "content") if self._is_chat else (choice, "text")
        text = message.get(field) or ""
        if message.pop("role", None) is not None and not text and choice.get("finish_reason") is None:
            return False
        if self._missing:
            if not text.startswith(self._missing) and not self._missing.startswith(text):
                raise ContradictionError(f"decode sampled {text!r}, prefill had sampled {self._missing!r}")
            num_sent = min(len(text), len(self._missing))
            text, self._missing = text[num_sent:], self._missing[num_sent:]
            message[field] = text
        others = {key for key, value in message.items() if value and key not in (field, "index", "logprobs")}
        return bool(text or others or choice.get("finish_reason"))


def _parsed(data: bytes) -> dict[str, Any]:
    """Parses a chunk; empty for other data, such as the end mark."""
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return chunk if isinstance(chunk, dict) else {}


def _written(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
