"""Instances of one role with their health, without a proxy: what a failure says of the ranks of a server."""

import asyncio

from kvpipe.proxy import Instance, ProxyConfig
from kvpipe.proxy.pools import Asks, HttpPool

RANKS = tuple(Instance(f"http://p{server}:1", f"p{server}:{7100 + rank}", rank) for server in "ab" for rank in range(3))


class FoundRanks:
    """Ranks that have been found, and how often they were asked for."""

    num_asked = 0

    def of(self, servers):
        self.num_asked += 1
        return RANKS if servers else ()


def pool(ranks, role="prefill"):
    servers = tuple(dict.fromkeys(Instance(rank.url, "p:7100") for rank in RANKS))
    return HttpPool(role, ProxyConfig(prefill=servers, decode=servers), Asks(None, None, None, ranks))


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
