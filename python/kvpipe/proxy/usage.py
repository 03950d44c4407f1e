"""The usage that a client gets, read and corrected in an instance's answer without parsing the answer. Pure.

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


class Usage:
    """Tokens of one request, as its client gets them: however it was dispatched, P counts the cached tokens.

    D's own number would count the KV that it received or loaded. It stays where D has computed the prompt alone.

    Attributes:
        prompt_tokens: tokens of the prompt; None if no instance has reported them.
        cached_tokens: of these, those in P's prefix cache; None if P did not compute the prompt, or does not report it.
        output_tokens: tokens of the answer; None if the instance that answers does not report them.
    """

    def __init__(self) -> None:
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.output_tokens: int | None = None
        self._rest = b""

    def prefilled(self, prompt_tokens: int | None, cached_tokens: int | None) -> None:
        """Note the usage that P reports; None, None drops that of an earlier P."""
        self.prompt_tokens, self.cached_tokens = prompt_tokens, cached_tokens

    def whole(self, body: bytes) -> bytes:
        """Returns an answer, or complete events of a stream, for the client."""
        if (tokens := read_tokens(body)) is not None:
            self.prompt_tokens, self.output_tokens = tokens
        return body if self.cached_tokens is None else with_cached_tokens(body, self.cached_tokens)

    def feed(self, piece: bytes) -> bytes:
        """Returns the bytes that can be sent after this piece; an event that is corrected waits for its end."""
        piece = self._rest + piece
        at = piece.rfind(_EVENT_END)
        end = 0 if at < 0 else at + len(_EVENT_END)
        if self.cached_tokens is None or len(piece) - end > _MAX_EVENT_BYTES:
            end = len(piece)
        self._rest = piece[end:]
        return self.whole(piece[:end])

    def end(self) -> bytes:
        """Returns an incomplete event at the end of a stream."""
        return self._rest
