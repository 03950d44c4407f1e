"""Answers that end in order although the instance has broken off, as vLLM writes them."""

from __future__ import annotations

import json

import pytest

from kvpipe.queue.chunks import failure_in


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
