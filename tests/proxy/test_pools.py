"""Instances of one role with their health, without a proxy: what a failure says of the ranks of a server."""

import asyncio

import pytest

from kvpipe.proxy import Instance, ProxyConfig
from kvpipe.proxy.pools import Asks, HttpPool
from kvpipe.proxy.upstream import InstanceError

from .harness import run

RANKS = tuple(Instance(f"http://p{server}:1", f"p{server}:{7100 + rank}", rank) for server in "ab" for rank in range(3))


class FoundRanks:
    """Ranks that have been found, and how often they were asked for."""

    num_asked = 0

    def of(self, servers):
        self.num_asked += 1
        return RANKS if servers else ()


class StoppablePorts:
    """The HTTP port of each server, which hangs while the server is stopped, and control ports that always do."""

    status = 200

    def __init__(self):
        self.going = {rank.url: asyncio.Event() for rank in RANKS}
        for going in self.going.values():
            going.set()

    async def get(self, role, instance, path, headers):
        await self.going[instance.url].wait()
        return self

    async def describe(self, address, timeout=5.0):  # noqa: ASYNC109 - the real one has it
        await asyncio.Event().wait()

    def close(self):
        """As that of an answer."""


def pool(ranks, role="prefill", ports=None, **settings):
    servers = tuple(dict.fromkeys(Instance(rank.url, "p:7100") for rank in RANKS))
    config = ProxyConfig(prefill=servers, decode=servers, **settings)
    return HttpPool(role, config, Asks(ports, ports, None, ranks))


async def freeze(asked, rank):
    with pytest.raises(InstanceError, match="is frozen"):
        await asked.unless_frozen(rank, asyncio.Event().wait(), lambda: True)


@pytest.fixture
def _soon(monkeypatch):
    """Probes and requests wait for no second."""
    for name in ("probes._INTERVAL_S", "probes._SLOW_S", "probed._LOOK_S"):
        monkeypatch.setattr(f"kvpipe.proxy.{name}", 0.01)


@pytest.mark.usefixtures("_soon")
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_server_is_frozen_with_all_its_ranks_until_the_one_that_was_asked_goes_on(role):
    async def scene():
        ports = StoppablePorts()
        asked = pool(FoundRanks(), role, ports, frozen_after_s=0.05)
        first, second = RANKS[:3], RANKS[3:]
        ports.going[first[0].url].clear()
        await freeze(asked, first[0])
        assert [asked.takes(rank) for rank in RANKS] == [False] * 3 + [True] * 3
        assert set(asked.order()[3:]) == set(first)
        states = await asked.health()
        assert [states[rank.name][:9] for rank in RANKS] == ["is frozen"] * 3 + ["ok"] * 3
        asked.check()
        ports.going[second[0].url].clear()
        await freeze(asked, second[1])
        with pytest.raises(InstanceError, match="is frozen"):
            asked.check()
        ports.going[first[0].url].set()
        await asked.until_thawed(first[1])
        assert [asked.is_frozen(rank) for rank in RANKS] == [False] * 3 + [True] * 3
        assert all(map(asked.takes, first))
        await asked.close()

    run(scene)


def test_a_failure_of_a_whole_server_has_all_its_ranks_asked_last_and_one_of_a_rank_has_that_one():
    async def scene():
        of_server, of_rank = pool(FoundRanks()), pool(FoundRanks())
        of_server.failed(RANKS[0], is_server=True)
        of_rank.failed(RANKS[0], is_server=False)
        assert {instance.url for instance in of_server.order()[3:]} == {RANKS[0].url}
        assert of_rank.order()[-1] == RANKS[0]

    asyncio.run(scene())


def test_an_instance_that_takes_requests_is_not_compared_with_all_others():
    async def scene():
        ranks = FoundRanks()
        asked = pool(ranks, "decode")
        assert all(map(asked.takes, RANKS))
        assert ranks.num_asked == 0

    asyncio.run(scene())
