"""Many agents that connect to one agent at one instant, over real UCX."""

import socket

import pytest

from kvpipe import Agent
from tests.peers import wait_until

NUM_PROCESSES = 4
AGENTS_EACH = 25


@pytest.fixture
def crowd(start):
    """Processes whose agents are ready to connect."""
    children = [start("connect_many", AGENTS_EACH) for _ in range(NUM_PROCESSES)]
    for child in children:
        assert child.read() == "ready"
    return children


def connect_all(crowd, hub):
    for child in crowd:
        child.tell(hub.address)
    assert [child.read() for child in crowd] == [f"{AGENTS_EACH} connected"] * NUM_PROCESSES
    wait_until(lambda: len(hub.peers) == NUM_PROCESSES * AGENTS_EACH)


@pytest.mark.ucx
def test_a_hundred_agents_that_connect_at_one_instant_all_get_in(crowd):
    with Agent() as hub:
        connect_all(crowd, hub)


@pytest.mark.ucx
def test_a_hundred_agents_get_in_behind_three_hundred_strangers_without_the_token(crowd):
    with Agent() as hub:
        host, port = hub.address.split(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(300)]
        for stranger in strangers[::2]:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        connect_all(crowd, hub)
        for stranger in strangers:
            stranger.close()
