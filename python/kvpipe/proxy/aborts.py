"""Finds the abort of a request in an instance's answer. Pure.

vLLM that is shut down ends its answers in order, with `finish_reason: abort`, as if they were complete.
"""

# As vLLM writes it. In a text, the quotation marks would have backslashes.
_ABORTED = b'"finish_reason":"abort"'
_EVENT_END = b"\n\n"
ABORT_REASON = "has aborted the request, as an instance does that is shut down"


def is_aborted(body: bytes) -> bool:
    """True if an answer that is no stream was aborted."""
    return _ABORTED in body


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
