"""Many agents that connect to one agent at one instant, over real UCX."""

import pytest

from kvpipe import Agent
from tests.peers import wait_until
from tests.strangers import strangers

NUM_PROCESSES = 4
AGENTS_EACH = 75
NUM_AGENTS = NUM_PROCESSES * AGENTS_EACH

pytestmark = [pytest.mark.ucx, pytest.mark.slow]


@pytest.fixture(scope="module")
def crowd(start_for_module):
    """Processes whose agents are ready to connect."""
    children = [start_for_module("connect_many", AGENTS_EACH) for _ in range(NUM_PROCESSES)]
    for child in children:
        assert child.read() == "ready"
    return children


def connect_all(crowd, hub):
    for child in crowd:
        child.tell(hub.address)
    assert [child.read() for child in crowd] == [f"{AGENTS_EACH} connected"] * NUM_PROCESSES
    wait_until(lambda: len(hub.peers) == NUM_AGENTS)


def test_three_hundred_agents_that_connect_at_one_instant_all_get_in(crowd):
    with Agent() as hub:
        connect_all(crowd, hub)


def test_three_hundred_agents_get_in_behind_as_many_strangers_without_the_token(crowd):
    with Agent() as hub, strangers(hub.address, NUM_AGENTS):
        connect_all(crowd, hub)
