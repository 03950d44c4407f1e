"""Streams are split into events."""

import pytest

from kvpipe.proxy.events import Events


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7, 100])
def test_events_are_the_same_in_pieces_of_any_size(num_bytes):
    stream = b"data: a\n\n\ndata: b\n\n\n\ndata: c\n\nda"
    events, found = Events(), []
    for start in range(0, len(stream), num_bytes):
        found += events.feed(stream[start : start + num_bytes])
    assert found == [b"data: a", b"\ndata: b", b"data: c"]
    assert events.end() == b"da"
    assert events.num_bytes_left == 2
