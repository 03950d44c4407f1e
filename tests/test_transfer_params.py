"""`kv_transfer_params` in the dialect of NixlConnector: what is written is read, and what is wrong is named."""

import pytest

from kvpipe import ConfigError, transfer_params
from kvpipe.transfer_params import ConsumeParams, LoadParams, ProduceParams, parse

HANDOFF = "0f" * 16
ID = bytes.fromhex(HANDOFF)
# Parameters that vLLM's own example of a P/D proxy, and routers made after it, send to the producer.
ROUTERS_TO_PRODUCER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
ANSWER = transfer_params.produced(
    HANDOFF,
    "10.0.0.1:7100",
    engine_id="engine",
    parallel_size=2,
    num_tokens=40,
    block_ids=[[3, 9]],
    first_token=7,
)


def test_a_producer_without_a_handoff_chooses_one():
    assert parse(ROUTERS_TO_PRODUCER) == ProduceParams(None)


def test_a_producer_takes_the_handoff_that_it_is_given():
    assert parse(transfer_params.produce(HANDOFF)) == ProduceParams(ID)
    assert parse(ROUTERS_TO_PRODUCER | {"kvpipe": {"handoff": HANDOFF}}) == ProduceParams(ID)


def test_a_consumer_is_given_handoff_and_control_port():
    found = parse(transfer_params.consume(HANDOFF, "10.0.0.1:7100"))
    assert found == ConsumeParams(ID, "10.0.0.1", 7100)
    assert found.producer == "10.0.0.1:7100"


@pytest.mark.parametrize("address", ["host.example:1", "[fe80::1]:65535", "[::1]:80"])
def test_the_address_of_a_producer_comes_back_as_it_was(address):
    assert parse(transfer_params.consume(HANDOFF, address)).producer == address


def test_a_port_may_come_as_text():
    params = transfer_params.consume(HANDOFF, "host:7100") | {"remote_port": "7100"}
    assert parse(params).port == 7100


def test_what_a_producer_answers_is_what_its_consumer_needs():
    assert parse(ANSWER) == ConsumeParams(ID, "10.0.0.1", 7100)
    assert ANSWER["kvpipe"]["first_token"] == 7, "which its consumer gets from the producer itself"


def test_what_a_store_is_to_load_may_have_the_producers_token():
    assert parse(transfer_params.load(HANDOFF)) == LoadParams(ID)
    assert parse(transfer_params.load(HANDOFF, 7)) == LoadParams(ID, 7)
    with pytest.raises(ConfigError, match="first_token"):
        parse({"kvpipe": {"handoff": HANDOFF, "store": "load", "first_token": "7"}})


def test_a_router_that_does_not_know_kvpipe_may_drop_its_key():
    rest = {name: value for name, value in ANSWER.items() if name != "kvpipe"}
    assert parse(rest) == ConsumeParams(ID, "10.0.0.1", 7100)


def test_what_a_producer_answers_has_every_field_of_nixls():
    names = {
        "do_remote_prefill",
        "do_remote_decode",
        "remote_block_ids",
        "remote_engine_id",
        "remote_request_id",
        "remote_host",
        "remote_port",
        "tp_size",
        "dcp_size",
        "pp_size",
        "remote_num_tokens",
        "remote_blocks_expiry_time",
        "transfer_mode",
    }
    assert set(ANSWER) == names | {"kvpipe"}
    assert ANSWER["remote_block_ids"] == [[3, 9]], "one list for each group of KV caches"


@pytest.mark.parametrize("tokens", [(7,), (7, 0, 7)])
def test_a_request_may_go_on_alone_after_the_tokens_that_its_client_has(tokens):
    found = parse(transfer_params.resume(HANDOFF, tokens))
    assert (found, found.producer) == (ConsumeParams(ID, "", 0, tokens), "")


def test_a_request_brings_no_more_tokens_than_the_engine_can_hold():
    parsed = parse(transfer_params.resume(HANDOFF, [7] * 64), max_model_len=64)
    assert len(parsed.tokens) == 64
    with pytest.raises(ConfigError, match="tokens of length 65: expected 64 at most, the engine's max_model_len"):
        parse(transfer_params.resume(HANDOFF, [7] * 65), max_model_len=64)


@pytest.mark.parametrize("params", [None, 7, "x", [1], {}, {"do_remote_decode": False, "do_remote_prefill": False}])
def test_parameters_that_ask_for_nothing_are_none(params):
    assert parse(params) is None


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"kvpipe": [10**5000]}, "kvpipe of type list: expected a JSON object"),
        ({"kvpipe": {"handoff": 10**5000}}, "expected do_remote_decode or do_remote_prefill"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "a request has one role"),
        (transfer_params.produce("0f"), "handoff='0f': expected 32 hex digits"),
        (transfer_params.produce(10**5000), "handoff=int: expected 32 hex digits"),
        (transfer_params.produce("f" * 5000), f"handoff='{'f' * 64}': expected"),
        (transfer_params.resume(HANDOFF, [7, 10**5000]), "tokens of type int: expected a token id"),
        (transfer_params.consume("cmpl-1-0", "h:1"), "handoff='cmpl-1-0': expected 32 hex digits"),
        (transfer_params.consume(HANDOFF, "h:1") | {"remote_host": ""}, "remote_host=''"),
        (transfer_params.consume(HANDOFF, "h:1") | {"remote_host": [10**5000]}, "remote_host=list"),
        (transfer_params.consume(HANDOFF, "h:1") | {"remote_host": "h" * 254}, "remote_host='h"),
        (transfer_params.consume(HANDOFF, "h:1") | {"remote_port": 0}, "remote_port of type int: expected a port"),
        (transfer_params.consume(HANDOFF, "h:1") | {"remote_port": True}, "remote_port of type bool"),
        (transfer_params.consume(HANDOFF, "h:1") | {"remote_port": 1e5}, "remote_port of type float"),
        (transfer_params.consume(HANDOFF, "h:1") | {"remote_port": "9" * 5000}, "remote_port of type str"),
        (transfer_params.consume(HANDOFF, "h:1") | {"remote_port": 10**5000}, "remote_port of type int"),
        (transfer_params.resume(HANDOFF, [7, "seven"]), "tokens of type str: expected a token id"),
        (transfer_params.resume(HANDOFF, [True]), "tokens of type bool"),
        (transfer_params.resume(HANDOFF, []), "tokens of length 0: expected one at least"),
        (transfer_params.resume("cmpl-1-0", [7]), "handoff='cmpl-1-0': expected 32 hex digits"),
        ({"kvpipe": {"handoff": HANDOFF, "tokens": 7}}, "tokens of type int: expected a list of token ids"),
        ({"kvpipe": {"handoff": HANDOFF, "tokens": "77"}}, "tokens of type str: expected a list of token ids"),
        ({"kvpipe": {"handoff": HANDOFF, "first_token": 7}}, "expected do_remote_decode or do_remote_prefill"),
    ],
)
def test_wrong_parameters_are_named(params, reason):
    with pytest.raises(ConfigError, match=reason):
        parse(params)
