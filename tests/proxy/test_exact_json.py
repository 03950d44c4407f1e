"""JSON of clients reaches P and D with the values that vLLM reads in the client's own bytes, or not at all."""

import asyncio
import json
import sys
import threading
from io import BytesIO

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpipe.proxy import exact_json
from kvpipe.proxy.bodies import parse_body

from .harness import CHAT, COMPLETIONS, run, stage

TEXT = '{"model":"m","prompt":"hé 😀","max_tokens":8%s}'


def with_field(field):
    return (TEXT % f',"more":{field}').encode()


PASSED = {
    "plain": (TEXT % "").encode(),
    "byte order mark": (TEXT % "").encode("utf-8-sig"),
    "UTF-16": (TEXT % "").encode("utf-16"),
    "UTF-16LE": (TEXT % "").encode("utf-16-le"),
    "UTF-32": (TEXT % "").encode("utf-32"),
    "NaN": with_field("[NaN, Infinity, -Infinity]"),
    "beyond a float": with_field("[1e400, -1e400, 1E+999]"),
    "many digits, and an exponent": with_field("[" + "1" * 250 + "e99, -" + "2" * 310 + ".5]"),
    "64 bits": with_field("[18446744073709551615, -9223372036854775808]"),
    "over 64 bits": with_field("[18446744073709551616, -9223372036854775809, 123456789012345678901234567890]"),
    "4,000 digits": with_field("1" * 4000),
    "digits in a string": with_field('"12345678901234567890123"'),
    "floats": with_field("[0.1, 1.0, 1e2, -0.0, 0.1000000000000000055511151231257827, 12345678901234567890.5, 5e-324]"),
    "minus zero": with_field("-0"),
    "the same key twice": with_field('1,"more":2,"prompt":"last"'),
    "a pair of surrogates": with_field('"\\ud83d\\ude00"'),
    "escapes": with_field('"\\u0000\\u001f\\u2028\\/"'),
}
REFUSED = {
    "half a pair of surrogates": with_field('"\\ud83d"'),
    "the same in a key": with_field('{"\\ude00":1}'),
    "the same in UTF-8": b'{"prompt":"\xed\xa0\x80"}',
    "no UTF-8": b'{"prompt":"\xff"}',
    "Latin-1": '{"prompt":"é"}'.encode("latin-1"),
    "nested too deep": with_field("[" * 2000 + "]" * 2000),
    "nested too deep for orjson": with_field("[" * 400 + "]" * 400),
    "control character": with_field('"\n"'),
    "more than one value": PASSED["plain"] + b"{}",
    "nothing": b"",
    "no object": b"NaN",
}
FIELDS = [
    *("best_of", "echo", "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "min_tokens"),
    *("model", "n", "prompt", "prompt_logprobs", "return_token_ids", "stop", "stream", "stream_options", "tools"),
    *("truncate_prompt_tokens", "use_beam_search", "vllm_xargs"),
]


async def posted(s, raw, path=COMPLETIONS):
    headers = {"Content-Type": "application/json"}
    async with s.client.post(s.url + path, data=BytesIO(raw), headers=headers) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("case", PASSED)
def test_every_value_that_vllm_reads_reaches_both_instances_as_it_is(case):
    async def scene():
        async with stage() as s:
            assert (await posted(s, PASSED[case]))[0] == 200
            for seen, ours in ((s.prefill[0], {"max_tokens", "n", "stream"}), (s.decode[0], set())):
                body = {name: value for name, value in seen.bodies[0].items() if name != "kv_transfer_params"}
                sent = json.loads(PASSED[case])
                assert {repr((name, body[name])) for name in body.keys() - ours} == {
                    repr((name, sent[name])) for name in sent.keys() - ours
                }

    run(scene)


@pytest.mark.parametrize("case", REFUSED)
def test_a_body_that_cannot_be_passed_on_as_it_is_is_refused_with_the_reason(case):
    async def scene():
        async with stage() as s:
            status, body = await posted(s, REFUSED[case])
            assert status == 400
            assert orjson.loads(body)["error"]["message"].startswith("request body ")
            assert s.prefill[0].bodies == s.decode[0].bodies == []

    run(scene)


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("more", ["", ',"stream":true'])
def test_a_number_that_the_proxy_does_not_know_is_refused_by_an_instance_and_breaks_nothing(path, field, more):
    async def scene():
        raw = f'{{"model":"m","prompt":"hello","messages":[{{"content":"x"}}]{more},"{field}":NaN}}'.encode()
        async with stage(split_from=1) as s:
            assert (await posted(s, raw, path))[0] == 200
            assert repr(s.decode[0].bodies[0][field]) == "nan"

    run(scene)


@pytest.mark.parametrize(
    "more",
    ['"12345678901234567890123"', '"1e400\\""', "18446744073709551615", "NaN", "0.1000000000000000055511151231257827"],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_the_numbers_of_a_body_cost_no_call_each(more, encoding):
    raw = f"[{'1, 0.5, ' * 1000}{more}]".encode(encoding)
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(frame) if event == "call" else None)
    try:
        value = exact_json.read(raw)
    finally:
        sys.setprofile(None)
    assert len(value) == 2001
    assert len(calls) < 100


def test_a_large_body_is_parsed_while_other_requests_are_answered(monkeypatch):
    is_begun, is_answered = threading.Event(), threading.Event()

    def parse(raw):
        is_begun.set()
        assert is_answered.wait(20), "the other request waits"
        return parse_body(raw)

    monkeypatch.setattr("kvpipe.proxy.app.parse_body", parse)

    async def scene():
        async with stage() as s:
            large = asyncio.create_task(posted(s, with_field(f'"{"x" * (2 << 20)}"')))
            await asyncio.to_thread(is_begun.wait, 20)
            async with s.client.get(s.url + "/metrics") as response:
                assert response.status == 200
            is_answered.set()
            assert (await large)[0] == 200

    run(scene, 60)


numbers = st.integers() | st.floats() | st.integers(-(1 << 70), 1 << 70)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(values, st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32"]), st.booleans())
def test_what_is_read_is_written_with_the_same_values(value, encoding, is_ascii):
    raw = json.dumps(value, ensure_ascii=is_ascii).encode(encoding)
    assert repr(json.loads(orjson.dumps(exact_json.read(raw)))) == repr(value)
