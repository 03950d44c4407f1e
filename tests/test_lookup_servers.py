"""LookupBuffer: clients of several servers, and clients that ask for much at once."""

import numpy as np
import pytest

from kvpipe import CapacityError, LookupBuffer, PeerLostError
from tests.peers import MIB
from tests.test_lookup_buffer import HALF, MOST, TIMEOUT_S, eventually, finish, in_thread, insert, select

pytestmark = pytest.mark.ucx


def test_several_servers_are_all_asked_and_the_first_is_inserted_at():
    with LookupBuffer() as one, LookupBuffer() as two, LookupBuffer() as three:
        for server in (one, two, three):
            server.serve()
        with LookupBuffer.connect(one.address, two.address, three.address) as client:
            assert select(client, None) is None
            insert(client, [1])
            assert [server.stats().num_entries for server in (one, two, three)] == [1, 0, 0]
            insert(three, [3])
            assert select(client, [3]) == [3]
            waiting = in_thread(lambda: select(client, [2], None))
            eventually(lambda: all(server.stats().num_waiting == 1 for server in (one, two, three)))
            insert(two, [2])
            assert finish(*waiting) == [2]
            eventually(lambda: all(server.stats().num_waiting == 0 for server in (one, two, three)))
            assert select(client, None) == [1]


def test_entries_of_all_servers_at_once_are_consumed_once_each():
    with LookupBuffer() as one, LookupBuffer() as two:
        for server in (one, two):
            server.serve()
        with LookupBuffer.connect(one.address, two.address) as client:
            for i in range(100):
                insert(one, [i], HALF[:100_000])
                insert(two, [1000 + i], HALF[:100_000])
            taken = [select(client, None, TIMEOUT_S)[0] for _ in range(200)]
            assert sorted(taken) == [*range(100), *range(1000, 1100)]
            assert select(client, None) is None
        eventually(lambda: one.stats().num_taken == two.stats().num_taken == 100)


def test_a_client_that_lost_one_of_its_servers_raises():
    with LookupBuffer() as one, LookupBuffer() as two:
        for server in (one, two):
            server.serve()
        with LookupBuffer.connect(one.address, two.address) as client:
            waiting = in_thread(lambda: select(client, [2], None))
            eventually(lambda: two.stats().num_waiting == 1)
            gone = two.address
            two.close()
            assert isinstance(finish(*waiting), PeerLostError)
            with pytest.raises(PeerLostError, match=gone):
                select(client, None)
        eventually(lambda: one.stats().num_waiting == 0)


def test_inserts_beyond_those_that_may_wait_at_the_server_wait_in_the_client():
    with LookupBuffer(MIB) as server:
        server.serve()
        with LookupBuffer.connect(server.address) as client:
            insert(client, [0], MOST)
            works = [client.iinsert(np.array([i]), None, HALF[:80], None, None) for i in range(1, 80)]
            eventually(lambda: server.stats().num_waiting == 64)
            for timeout in (0, 0.05):
                with pytest.raises(CapacityError, match="64 earlier inserts of this buffer wait for place"):
                    insert(client, [99], timeout=timeout)
            assert client.stats().num_waiting == len(works)
            assert [select(client, None, TIMEOUT_S)[0] for _ in range(80)] == list(range(80))
            for work in works:
                work.wait(TIMEOUT_S)


def test_hundreds_of_selects_may_wait_and_those_that_are_dropped_leave_nothing():
    with LookupBuffer() as server:
        server.serve()
        with LookupBuffer.connect(server.address) as client:
            works = [client.idrop_select(np.array([i]), None) for i in range(500)]
            eventually(lambda: server.stats().num_waiting == 500)
            del works[100:]
            eventually(lambda: server.stats().num_waiting == 100)
            for i in reversed(range(500)):
                insert(server, [i])
            assert [work.wait(TIMEOUT_S)[0].tolist() for work in works] == [[i] for i in range(100)]
            eventually(lambda: server.stats().num_leased == 0)
            assert server.stats().num_entries == 400
