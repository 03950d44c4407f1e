"""Pipe: admission of peers, and the errors of refused ones."""

import socket
import time

import pytest

from kvpipe import Agent, AuthenticationError, ConfigError, ConnectError, LookupBuffer, Pipe, TransferTimeoutError
from tests.test_pipe import both_ways

pytestmark = pytest.mark.usefixtures("transport")


def test_a_wrong_token_is_refused_and_the_right_one_still_accepted():
    with Pipe.listen(token="right") as receiver:
        for token in ("wrong", None):
            with pytest.raises(AuthenticationError, match="give both sides the same KVPIPE_TOKEN"):
                Pipe.connect(receiver.address, token=token)
        with Pipe.connect(receiver.address, token="right") as sender:
            both_ways(sender, receiver)


def test_a_second_sender_is_refused_and_the_first_not_disturbed(pair):
    sender, receiver = pair
    with pytest.raises(ConnectError, match="already has a sender"):
        Pipe.connect(receiver.address)
    both_ways(sender, receiver)


def test_a_port_without_a_listener_is_a_connect_error_with_the_address():
    with socket.socket() as bound:  # nothing else gets the port
        bound.bind(("127.0.0.1", 0))
        address = "{}:{}".format(*bound.getsockname())
        with pytest.raises(ConnectError, match=address):
            Pipe.connect(address, timeout=0.3)


def test_a_listener_that_does_not_answer_is_a_connect_error_in_time(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        started = time.monotonic()
        with pytest.raises((ConnectError, TransferTimeoutError), match=address):
            Pipe.connect(address, timeout=0.3)
        assert time.monotonic() - started < 2


def test_by_default_all_listen_on_loopback():
    with Pipe.listen() as receiver, Agent() as agent, LookupBuffer() as buffer:
        buffer.serve()
        addresses = [receiver.address, agent.address, buffer.address]
    assert [address.partition(":")[0] for address in addresses] == ["127.0.0.1"] * 3


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0"])
def test_others_can_reach_us_only_with_a_token(address):
    with pytest.raises(ConfigError, match=r"needs a token.*set KVPIPE_TOKEN or pass token="):
        Pipe.listen(address)
    with pytest.raises(ConfigError, match="needs a token"):
        Agent(address)
    with pytest.raises(ConfigError, match="needs a token of 16 bytes or more"):
        Pipe.listen(address, token="secret")
    with Pipe.listen(address, token="sixteen bytes...") as receiver:
        assert receiver.address


def test_a_listener_accepts_the_next_token_of_its_environment_too(monkeypatch):
    monkeypatch.setenv("KVPIPE_TOKEN_NEXT", "the next one")
    for token in ("the current one", "the next one"):
        with Pipe.listen(token="the current one") as receiver, Pipe.connect(receiver.address, token=token) as sender:
            both_ways(sender, receiver)
    with Pipe.listen(token="the current one") as receiver, pytest.raises(AuthenticationError):
        Pipe.connect(receiver.address, token="another")


@pytest.mark.parametrize("address", ["zzz", "127.0.0.1", "127.0.0.1:99999", ":80", "", "a:b"])
def test_connecting_to_what_is_no_address_is_refused_by_name(address):
    with pytest.raises(ConfigError, match=f'"{address}" is no address; expected HOST:PORT'):
        Pipe.connect(address, token="secret")
    with Agent() as agent, pytest.raises(ConfigError, match=f'"{address}" is no address; expected HOST:PORT'):
        agent.connect(address)


def test_an_unknown_name_is_a_connect_error():
    with pytest.raises(ConnectError, match=r"cannot reach unknown\.invalid:80"):
        Pipe.connect("unknown.invalid:80", timeout=20)
    with Agent() as agent, pytest.raises(ConnectError, match=r"cannot reach unknown\.invalid:80"):
        agent.connect("unknown.invalid:80", timeout=20)


@pytest.mark.parametrize("address", ["nonsense", "127.0.0.1", "127.0.0.1:99999", "203.0.113.1:0"])
def test_a_bad_address_is_named(address):
    with pytest.raises(ConfigError, match=address):
        Pipe.listen(address, token="secret")


def test_garbage_on_the_port_disturbs_no_peer():
    with Pipe.listen() as receiver:
        host, port = receiver.address.split(":")
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 1000)
            with Pipe.connect(receiver.address) as sender:
                both_ways(sender, receiver)
