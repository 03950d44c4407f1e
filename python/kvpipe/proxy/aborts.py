"""Finds the abort of a request in an instance's answer. Pure.

vLLM that is shut down ends its answers in order, with `finish_reason: abort`, as if they were complete. A stream that
it aborts before the first token has no choice, and one of several choices lacks those that have no token.
"""

# As vLLM writes it. In a text, the quotation marks would have backslashes.
_ABORTED = b'"finish_reason":"abort"'
_EVENT_END = b"\n\n"
_DONE = b"data: [DONE]"
_ERROR_EVENT = _EVENT_END + b'data: {"error"'
_FINISHED = b'"finish_reason":"'
# Of an event with the usage alone.
_NO_CHOICES = b'"choices":[]'
_LONGEST_START = 16 << 10
ABORT_REASON = "has aborted the request, as an instance does that is shut down"


def is_aborted(body: bytes) -> bool:
    """True if an answer that is no stream was aborted."""
    return _ABORTED in body


def ends_without_choice(first: bytes) -> bool:
    """True if the first bytes of a stream have its end, and no choice before that."""
    return next((event for event in first.split(_EVENT_END) if _NO_CHOICES not in event), b"").startswith(_DONE)


def may_end_without_choice(first: bytes) -> bool:
    """True if a stream that begins so may have no choice; more of its bytes will tell."""
    *events, rest = first.split(_EVENT_END)
    is_start = all(_NO_CHOICES in event for event in events) and len(first) < _LONGEST_START
    return is_start and (_NO_CHOICES in rest or _DONE.startswith(rest))


class AbortCheck:
    """Looks for an abort in a stream.

    Attributes:
        has_found: true if there was one.
    """

    def __init__(self) -> None:
        self.has_found = False
        self._tail = b""

    def feed(self, piece: bytes) -> bytes:
        """Returns the next piece, up to the event with the abort."""
        text = self._tail + piece
        found = text.find(_ABORTED)
        if found < 0:
            self._tail = text[1 - len(_ABORTED) :]
            return piece
        self.has_found = True
        before, end, _ = piece[: max(0, found - len(self._tail))].rpartition(_EVENT_END)
        return before + end


class ChoiceCheck:
    """Looks for the end of a stream in which some choices have ended, as vLLM writes it, and others are missing.

    An error in the stream explains what is missing.

    Args:
        num_choices: choices of a complete answer; 0 if unknown. Of one alone, `ends_without_choice` tells.

    Attributes:
        has_found: true if it ended so.
    """

    def __init__(self, num_choices: int) -> None:
        self.has_found = False
        self._num_missing = num_choices if num_choices > 1 else 0
        self._have_some_ended = False
        self._tail = b""
        self._held = b""

    def feed(self, piece: bytes) -> bytes:
        """Returns the bytes that can be sent after this piece: not the end that comes too early, nor a part of it."""
        if self._num_missing <= 0:
            return piece
        piece = self._held + piece
        text = self._tail + piece
        num_ended = text.count(_FINISHED)
        self._num_missing -= num_ended
        self._have_some_ended |= num_ended > 0
        if self._num_missing <= 0 or _ERROR_EVENT in text:
            self._num_missing, self._held = 0, b""
            return piece
        found = text.find(_EVENT_END + _DONE)
        self.has_found = found >= 0 and self._have_some_ended
        rest = text[found + len(_EVENT_END) :] if self.has_found else text.rpartition(_EVENT_END)[2]
        num_held = len(rest) if self.has_found or _DONE.startswith(rest) else 0
        self._held = text[len(text) - num_held :]
        self._tail = text[: len(text) - num_held][1 - len(_FINISHED) :]
        return piece[: len(piece) - num_held]

    def end(self) -> bytes:
        """Returns the bytes that were held back when the stream ended."""
        return self._held
