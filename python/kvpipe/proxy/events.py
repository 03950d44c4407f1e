"""Events of a stream (server-sent events). Pure."""


class Events:
    """Splits the bytes of a stream into its events."""

    def __init__(self) -> None:
        self._rest = bytearray()

    @property
    def num_bytes_left(self) -> int:
        """Size of what there is of an event that is not complete."""
        return len(self._rest)

    def feed(self, piece: bytes) -> list[bytes]:
        """Returns the events that are complete, without the empty line after each."""
        searched = max(0, len(self._rest) - 1)  # an event may have any number of pieces
        self._rest += piece
        if self._rest.find(b"\n\n", searched) < 0:
            return []
        *events, self._rest = self._rest.split(b"\n\n")
        return [bytes(event) for event in events if event.strip()]

    def end(self) -> bytes:
        """Returns the rest at the end of the stream."""
        return bytes(self._rest)
