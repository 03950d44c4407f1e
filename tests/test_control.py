"""ControlClient: questions to a control port that is really there."""

import asyncio
import json
import os
import threading
import time

import pytest

from kvpipe import AuthenticationError, ClosedError, ConfigError, ConnectError, TransferTimeoutError, _kvpipe
from kvpipe.control import ControlClient, Moment, parse_handoff

HANDOFF = os.urandom(16)


@pytest.fixture
def port():
    control = _kvpipe.Control("127.0.0.1:0", b"", "engine")
    yield control
    control.close()


@pytest.fixture
def client():
    client = ControlClient()
    yield client
    client.close()


def open_handoff(port, handoff):
    port.open(handoff, bytes(32), 5, [("127.0.0.1:1", bytes(16))])


def released(port):
    return [event["handoff"] for event in port.drain() if event["event"] == "released"]


def test_an_instance_is_asked_who_it_is(port, client):
    port.describe_as(json.dumps({"engine_id": "engine", "num_blocks": 7}))
    assert client.describe(port.address).wait(10) == {"engine_id": "engine", "num_blocks": 7}


def test_releasing_a_handoff_gives_its_blocks_back_once(port, client):
    open_handoff(port, HANDOFF)
    assert client.release(port.address, HANDOFF.hex()).wait(10) is True
    assert released(port) == [HANDOFF]
    client.release(port.address, HANDOFF.hex()).wait(10)
    assert released(port) == []


def test_releasing_what_is_not_known_is_false_and_holds_for_what_comes_later(port, client):
    assert client.release(port.address, HANDOFF.hex()).wait(10) is False
    open_handoff(port, HANDOFF)
    client.describe(port.address).wait(10)
    assert released(port) == [HANDOFF]


def test_the_result_of_a_handoff_is_returned_and_none_when_unknown(port, client):
    assert client.result(port.address, HANDOFF.hex()).wait(10) is None
    port.set_result(HANDOFF, json.dumps({"result": "ok"}))
    assert client.result(port.address, HANDOFF.hex()).wait(10) == {"result": "ok"}


def test_questions_can_be_awaited_side_by_side(port, client):
    async def scene():
        async def ask():
            return await client.describe(port.address)

        async with asyncio.timeout(20):
            assert await asyncio.gather(*(ask() for _ in range(20))) == [{}] * 20

    asyncio.run(scene())


def test_a_port_that_came_back_is_asked_again(client):
    first = _kvpipe.Control("127.0.0.1:0", b"", "first")
    address = first.address
    client.describe(address).wait(10)
    first.close()
    with pytest.raises(ConnectionError):
        client.describe(address).wait(10)
    second = _kvpipe.Control(address, b"", "second")
    second.describe_as('"second"')
    assert client.describe(address).wait(10) == "second"
    second.close()


def test_a_closed_port_is_a_connect_error_with_the_address(port, client):
    address = port.address
    port.close()
    with pytest.raises(ConnectError, match=address):
        client.describe(address).wait(10)


def test_a_wrong_token_is_refused(port):
    stranger = ControlClient(token="wrong")
    with pytest.raises(AuthenticationError, match="KVPIPE_TOKEN"):
        stranger.describe(port.address).wait(10)
    stranger.close()


def test_a_question_without_an_answer_in_time_can_be_asked_again(port, client):
    with pytest.raises(TransferTimeoutError, match="did not answer in time"):
        client.describe(port.address, timeout=0).wait(10)
    assert client.describe(port.address).wait(10) == {}


@pytest.mark.parametrize("handoff", ["", "zz" * 16, "ab" * 15, "ab" * 17, None, 5, b"ab" * 16])
def test_what_is_no_handoff_id_is_named(port, client, handoff):
    for ask in (client.release, client.result):
        with pytest.raises(ConfigError, match=r"handoff=.*: expected 32 hex digits"):
            ask(port.address, handoff)


def test_a_handoff_id_is_32_hex_digits():
    assert parse_handoff(HANDOFF.hex()) == HANDOFF
    assert parse_handoff(HANDOFF.hex().upper()) == HANDOFF


def test_after_close_there_are_no_answers(port, client):
    client.close()
    client.close()
    with pytest.raises(ClosedError):
        client.describe(port.address)


def test_a_subscriber_is_notified_when_the_predicted_end_is_its_lead_away(port, client):
    subscribed = client.subscribe(port.address, HANDOFF.hex(), 5.0)
    open_handoff(port, HANDOFF)
    port.progress(HANDOFF, 1000.0)
    client.describe(port.address).wait(10)
    assert not subscribed.is_completed()
    port.progress(HANDOFF, 4.0)
    moment = subscribed.wait(10)
    assert moment.kind == "due"
    assert 0 < moment.remaining_s <= 4


def test_a_subscriber_is_notified_of_the_end_and_its_reason(port, client):
    subscribed = client.subscribe(port.address, HANDOFF.hex(), 5.0)
    awaited = client.watched(port.address, HANDOFF.hex())
    open_handoff(port, HANDOFF)
    port.finish(HANDOFF, [7], "length", 0, bytes(32))
    assert subscribed.wait(10) == Moment("finished")
    reason = 'a "reason"\n\twith \\ and é'
    port.withdraw(HANDOFF, reason)
    assert awaited.wait(10) == Moment("ended", reason=reason)


def test_a_wait_for_a_consumer_ends_in_a_loop_without_a_thread(port, client):
    consumer = _kvpipe.Control(None, b"", "consumer")
    open_handoff(port, HANDOFF)

    async def scene():
        before = set(threading.enumerate())
        awaited = client.watched(port.address, HANDOFF.hex())
        consumer.watch(HANDOFF, port.address)
        assert await awaited == Moment("watched")
        assert set(threading.enumerate()) <= before

    asyncio.run(scene())
    consumer.close()


def test_many_may_await_one_port_at_once(port, client):
    async def scene():
        handoffs = [os.urandom(16) for _ in range(50)]
        awaited = [client.subscribe(port.address, handoff.hex(), 1.0) for handoff in handoffs]
        for handoff in handoffs:
            open_handoff(port, handoff)
            port.finish(handoff, [7], "length", 0, bytes(32))
        assert [(await work).kind for work in awaited] == ["finished"] * 50

    asyncio.run(scene())


def test_a_subscription_has_a_deadline_at_the_client_too(port, client):
    with pytest.raises(TransferTimeoutError):
        client.subscribe(port.address, HANDOFF.hex(), 1.0, timeout=0.1).wait(10)


@pytest.mark.parametrize("lead_s", [-1.0, float("nan")])
def test_a_lead_that_is_no_duration_is_refused(port, client, lead_s):
    with pytest.raises(ConfigError):
        client.subscribe(port.address, HANDOFF.hex(), lead_s)


@pytest.fixture
def consumer():
    control = _kvpipe.Control("127.0.0.1:0", b"", "consumer", [("dtype", "float32")])
    yield control
    control.close()


@pytest.mark.parametrize(
    ("token", "dtype", "reason"),
    [
        (b"", "float32", ""),
        (b"", "bfloat16", 'dtype is "float32" here and "bfloat16" there'),
        (b"other", "float32", "KVPIPE_TOKEN"),
    ],
)
def test_a_consumer_is_asked_whether_it_can_use_a_producer(consumer, client, token, dtype, reason):
    consumer.allow_checks([], [("127.0.0.0", 8)])
    producer = _kvpipe.Control("127.0.0.1:0", token, "producer", [("dtype", dtype)])
    try:
        for _ in range(2):
            found = client.check(consumer.address, producer.address).wait(10)
            assert reason in found
            assert bool(found) == bool(reason)
    finally:
        producer.close()


def test_a_mismatch_is_logged_by_the_consumer_at_once_and_once(consumer, client, caplog):
    consumer.allow_checks([], [])
    producer = _kvpipe.Control("127.0.0.1:0", b"", "producer", [("dtype", "bfloat16")])
    producer_address = producer.address
    try:
        for _ in range(3):
            client.check(consumer.address, producer_address).wait(10)
    finally:
        producer.close()
    for _ in range(2):
        client.check(consumer.address, "127.0.0.1:1").wait(10)
    deadline = time.monotonic() + 10
    while '"127.0.0.1:1"' not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    # A line of the test before may come now.
    lines = [line for line in caplog.messages if producer_address in line or '"127.0.0.1:1"' in line]
    assert len(lines) == 2
    assert 'dtype is \\"float32\\" here and \\"bfloat16\\" there' in lines[0]


def test_a_check_of_a_producer_that_is_not_there_says_so(consumer, client):
    consumer.allow_checks([], [])
    assert "127.0.0.1:1" in client.check(consumer.address, "127.0.0.1:1").wait(10)


@pytest.mark.parametrize("producer", ["10.0.0.1:7", "prefill-1:7", "nonsense", "", "x" * 9999])
def test_a_check_connects_to_allowed_hosts_only(consumer, client, producer):
    assert client.check(consumer.address, producer).wait(10) == "this engine consumes no handoffs"
    consumer.allow_checks(["prefill-0"], [("127.0.0.0", 8)])
    assert (
        client.check(consumer.address, producer)
        .wait(10)
        .endswith(("is not among allowed_producers", "expected HOST:PORT of a producer"))
    )
