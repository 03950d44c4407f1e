"""The facts in P's answer besides the KV: its token, its usage, and whether that token ends the request. Pure."""

from dataclasses import dataclass
from typing import Any, Self

import orjson


@dataclass(frozen=True, slots=True)
class PrefillAnswer:
    """P's answer to a request for one token; anything may have sent it.

    Attributes:
        fields: the parsed answer; empty if it is no JSON object.
    """

    fields: dict[str, Any]

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        """Parses P's answer."""
        try:
            fields = orjson.loads(raw)
        except orjson.JSONDecodeError:
            fields = None
        return cls(fields if isinstance(fields, dict) else {})

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt; None if P does not report it."""
        return _number(_object(self.fields.get("usage")).get("prompt_tokens"))

    @property
    def cached_tokens(self) -> int | None:
        """Of these, those that P found in its prefix cache; None if P does not report it."""
        usage = _object(self.fields.get("usage"))
        return _number(_object(usage.get("prompt_tokens_details")).get("cached_tokens"))

    @property
    def saved(self) -> str:
        """Id of the handoff that P saves in the store for D; empty if it saves none."""
        params = _object(_object(self.fields.get("kv_transfer_params")).get("kvpipe"))
        handoff = params.get("handoff") if params.get("store") == "load" else ""
        return handoff if isinstance(handoff, str) else ""

    def ends_request(self, body: dict[str, Any]) -> bool:
        """True if the token ends the client's request, by its end of sequence or a stop string.

        A stream's events can only be written by an instance: there D repeats the token and the end.
        """
        choices = self.fields.get("choices")
        choice = _object(choices[0]) if isinstance(choices, list) and len(choices) == 1 else {}
        return choice.get("finish_reason") == "stop" and not body.get("stream")

    def final_body(self) -> bytes:
        """The answer for the client, as vLLM answers a request without a handoff."""
        return orjson.dumps(self.fields | {"kv_transfer_params": None})


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: object) -> int | None:
    return value if type(value) is int else None
