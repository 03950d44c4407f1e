"""P's token, shown to the client of a stream before D's stream begins, and D's stream from there on. Pure.

What D says is reconciled by its text, never by its chunks: what goes beyond the text that was shown is passed on.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import orjson

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.bodies import CHAT_PATH

# They change what the chunk of a token says, or when it is said: only the instance knows how.
_FIELDS_OF_ITS_OWN = (
    "stop",
    "logprobs",
    "tools",
    "functions",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_token_offsets",
)


class ContradictionError(KVPipeError):
    """D's stream says something else than what was shown."""


def allows_early_token(body: dict[str, Any]) -> bool:
    """Whether P's token can be shown to the client of this request before D has said it."""
    options = body.get("stream_options")
    has_usage_in_chunks = isinstance(options, dict) and bool(options.get("continuous_usage_stats"))
    is_plain = not any(_is_set(body.get(field)) for field in _FIELDS_OF_ITS_OWN)
    return body.get("stream") is True and not has_usage_in_chunks and is_plain


def _is_set(value: Any) -> bool:
    """Whether a field asks for something; `logprobs: 0` does."""
    return value is not None and value is not False and value not in ("", [])


@dataclass(frozen=True, slots=True)
class EarlyToken:
    """What P's answer says about the first token.

    Attributes:
        token: its id.
        text: its text, which may be empty in a chat.
        role: of a chat's message.
        head: the fields that every chunk of the response has: id, created, model, object.
    """

    token: int
    text: str
    role: str
    head: dict[str, Any]

    @classmethod
    def of(cls, path: str, answer: bytes) -> Self | None:
        """Read P's answer; None if its token must not be shown alone.

        That is: a text that ends within a character, one that a parser has taken apart, a token that ends the request,
        and one that P does not name, because it has withdrawn the handoff.
        """
        try:
            parsed = orjson.loads(answer)
            choice = parsed["choices"][0]
            token = parsed["kv_transfer_params"]["kvpipe"]["first_token"]
            said = choice["message"] if path == CHAT_PATH else choice
            text = said["content"] if path == CHAT_PATH else said["text"]
            kind = "chat.completion.chunk" if path == CHAT_PATH else "text_completion"
            head = {"id": parsed["id"], "object": kind, "created": parsed["created"], "model": parsed["model"]}
        except (orjson.JSONDecodeError, LookupError, TypeError, ValueError):
            return None
        is_taken_apart = any(said.get(field) for field in ("reasoning", "reasoning_content", "tool_calls"))
        if type(token) is not int or not isinstance(text, str) or is_taken_apart:
            return None
        if choice.get("finish_reason") != "length" or text.endswith("\ufffd"):
            return None
        if path != CHAT_PATH and not text:
            return None
        return cls(token, text, str(said.get("role") or "assistant"), head)

    def events(self) -> bytes:
        """What the client is shown."""
        if self.head["object"] == "text_completion":
            return self._event({"text": self.text})
        role = self._event({"delta": {"role": self.role, "content": ""}})
        return role + (self._event({"delta": {"content": self.text}}) if self.text else b"")

    def _event(self, said: dict[str, Any]) -> bytes:
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": None}
        return _written(self.head | {"choices": [choice]})


class Continuation:
    """D's stream, as it goes on after what was shown."""

    def __init__(self, first: EarlyToken) -> None:
        self._head = {name: first.head[name] for name in ("id", "created")}
        self._missing = first.text
        self._is_chat = first.head["object"] != "text_completion"
        self._rest = b""
        self.has_sent = False

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """The events for the client that a piece of D's stream completes.

        Raises:
            ContradictionError: D says something else than what was shown; nothing of it was passed on.
        """
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        for event in events:
            if (passed := self._reconciled(event)) is not None:
                self.has_sent = True
                yield passed

    def end(self) -> bytes:
        """What D's stream ended with, if that was no whole event.

        Raises:
            ContradictionError: it ended before it had said what was shown.
        """
        if self._missing:
            raise ContradictionError(f"decode never said {self._missing!r}, which prefill had sampled")
        return self._rest

    def _reconciled(self, event: bytes) -> bytes | None:
        data = event.strip().removeprefix(b"data:").strip()
        chunk = _parsed(data)
        says_something = not chunk.get("choices")
        for choice in chunk.get("choices") or ():
            says_something |= self._take(choice)
        if not says_something:
            return None
        if self._missing:
            raise ContradictionError(f"decode said {data[:200]!r} before {self._missing!r}, which prefill had sampled")
        return _written(chunk | self._head) if "choices" in chunk else event + b"\n\n"

    def _take(self, choice: dict[str, Any]) -> bool:
        """Take from a choice what was shown; whether it says anything more."""
        said, field = (choice.get("delta") or {}, "content") if self._is_chat else (choice, "text")
        text = said.get(field) or ""
        if said.pop("role", None) is not None and not text and choice.get("finish_reason") is None:
            return False
        if self._missing:
            if not text.startswith(self._missing) and not self._missing.startswith(text):
                raise ContradictionError(f"decode said {text!r}, prefill had sampled {self._missing!r}")
            shown = min(len(text), len(self._missing))
            text, self._missing = text[shown:], self._missing[shown:]
            said[field] = text
        others = {key for key, value in said.items() if value and key not in (field, "index", "logprobs")}
        return bool(text or others or choice.get("finish_reason"))


def _parsed(data: bytes) -> dict[str, Any]:
    """A chunk; empty for what is none, such as the end's mark."""
    try:
        chunk = orjson.loads(data)
    except orjson.JSONDecodeError:
        return {}
    return chunk if isinstance(chunk, dict) else {}


def _written(chunk: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(chunk) + b"\n\n"
