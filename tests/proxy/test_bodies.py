from http import HTTPStatus

import orjson
import pytest

from kvpipe import transfer_params
from kvpipe.proxy.bodies import BodyError, decode_body, error_body, loading_body, parse_body, prefill_body

from .harness import CHAT, COMPLETIONS

CLIENT = {
    "model": "m",
    "prompt": "hello",
    "max_tokens": 64,
    "temperature": 0.7,
    "stream": True,
    "stream_options": {"include_usage": True},
}
PRODUCE = {"kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False, "kvpipe": {"handoff": "ab"}}}

MIN_TOKENS_CASES = [(0, 0), (1, 1), (5, 1), ("5", "5")]


def made_for_prefill(body, path=COMPLETIONS):
    return orjson.loads(prefill_body(body, path, transfer_params.produce("ab")))


def test_prefill_body_is_the_clients_cut_to_one_token_and_not_streamed():
    assert made_for_prefill(CLIENT) == {
        "model": "m",
        "prompt": "hello",
        "temperature": 0.7,
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        **PRODUCE,
    }


def test_prefill_body_limits_both_token_counts_in_chat_only():
    assert made_for_prefill({"messages": [], "max_completion_tokens": 9}, CHAT) == {
        "messages": [],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "n": 1,
        "stream": False,
        **PRODUCE,
    }
    assert "max_completion_tokens" not in made_for_prefill({"prompt": "x"})


@pytest.mark.parametrize(("given", "sent"), MIN_TOKENS_CASES)
def test_prefill_body_has_min_tokens_of_at_most_one_when_the_client_gave_one(given, sent):
    assert made_for_prefill({"prompt": "x", "min_tokens": given})["min_tokens"] == sent
    assert "min_tokens" not in made_for_prefill({"prompt": "x"})


def test_decode_body_is_the_clients_with_the_handoff():
    assert orjson.loads(decode_body(CLIENT, "ab", "host:7100")) == {
        **CLIENT,
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_request_id": "ab",
            "remote_host": "host",
            "remote_port": 7100,
        },
    }


def test_making_bodies_leaves_the_clients_unchanged():
    before = orjson.dumps(CLIENT)
    prefill_body(CLIENT, CHAT, transfer_params.produce("ab"))
    loading_body(CLIENT, "ab", 7)
    decode_body(CLIENT, "ab", "host:7100")
    assert orjson.dumps(CLIENT) == before


def test_parse_removes_the_clients_transfer_parameters_from_both_places():
    raw = b'{"a":1,"kv_transfer_params":{"x":1},"vllm_xargs":{"kv_transfer_params":"y","z":2}}'
    assert parse_body(raw) == {"a": 1, "vllm_xargs": {"z": 2}}


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"null", b'"text"', b'{"a":"\xff"}'])
def test_parse_refuses_what_is_not_a_json_object(raw):
    with pytest.raises(BodyError, match="request body"):
        parse_body(raw)


def test_errors_have_the_form_of_openai():
    assert orjson.loads(error_body(HTTPStatus.BAD_GATEWAY, "gone")) == {
        "error": {"message": "gone", "type": "BadGatewayError", "param": None, "code": 502}
    }
