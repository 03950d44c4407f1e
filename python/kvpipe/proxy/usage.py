"""Reads and corrects the usage in an instance's answer without parsing the answer. Pure.

A key with its quotes unescaped cannot stand inside a JSON string, so a search for one finds a key.
"""

import re

_TOKENS = re.compile(rb'"usage":\s*\{"prompt_tokens":\s*(\d+)[^{}]*"completion_tokens":\s*(\d+)')
_CACHED = re.compile(rb'("prompt_tokens_details":\s*\{[^{}]*?"cached_tokens":\s*)(?:\d+|null)')
_HAS_TOKENS = b'"completion_tokens":'
_HAS_CACHED = b'"cached_tokens":'
_EVENT_END = b"\n\n"
# An event without an end is not kept back beyond this.
_MAX_EVENT_BYTES = 1 << 20


def read_tokens(body: bytes) -> tuple[int, int] | None:
    """Tokens of the prompt and of the output; None if the body has no usage."""
    if _HAS_TOKENS not in body:
        return None
    found = _TOKENS.search(body, max(0, body.rfind(b'"usage":')))
    return (int(found[1]), int(found[2])) if found else None


def with_cached_tokens(body: bytes, num_tokens: int) -> bytes:
    """The body with another number of cached tokens, where it has one."""
    return _CACHED.sub(rb"\g<1>%d" % num_tokens, body) if _HAS_CACHED in body else body


class StreamUsage:
    """Corrects the cached tokens in a stream; keeps back an event until it is complete."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes, num_tokens: int) -> bytes:
        """Returns the complete events, corrected."""
        piece = self._rest + piece
        at = piece.rfind(_EVENT_END)
        end = 0 if at < 0 else at + len(_EVENT_END)
        if len(piece) - end > _MAX_EVENT_BYTES:
            end = len(piece)
        self._rest = piece[end:]
        return with_cached_tokens(piece[:end], num_tokens)

    def end(self) -> bytes:
        """Returns an incomplete event at the end of the stream."""
        return self._rest
