"""What ends an answer in order although the instance has broken off: as vLLM writes it."""

from __future__ import annotations

import json

import pytest

from kvpipe.queue.chunks import Events, failure_in


def event(value):
    return f"data: {json.dumps(value)}".encode()


def error(code):
    return event({"error": {"message": "no", "type": "x", "param": None, "code": code}})


@pytest.mark.parametrize("code", [400, 499, 500, 503, None])
def test_a_stream_breaks_off_with_an_error_that_is_not_the_requests(code):
    assert bool(failure_in(error(code))) == (code not in (400, 499))


def test_the_end_mark_and_comments_are_no_failure():
    for found in (b"data: [DONE]", b": ping"):
        assert not failure_in(found)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 7, 100])
def test_events_are_the_same_in_pieces_of_any_size(num_bytes):
    stream = b"data: a\n\n\ndata: b\n\n\n\ndata: c\n\nda"
    events, found = Events(), []
    for start in range(0, len(stream), num_bytes):
        found += events.feed(stream[start : start + num_bytes])
    assert found == [b"data: a", b"\ndata: b", b"data: c"]
    assert events.end() == b"da"
    assert events.num_bytes_left == 2
