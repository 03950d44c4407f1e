"""Agent: blocks that a peer takes from us, and what it is told of them."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest

from kvpipe import ClosedError, ConfigError, PeerLostError, TransferTimeoutError
from tests.peers import pattern, wait_until

NUM_BLOCKS, BLOCK_BYTES = 64, 4096
LOST_WITHIN_S = 2.0


@pytest.fixture
def room(other):
    """The region `kv` of the other agent, which may be written."""
    room = np.zeros((NUM_BLOCKS, BLOCK_BYTES // 4), np.uint32)
    other.register(room, "kv", BLOCK_BYTES, writable=True)
    return room


@pytest.fixture
def source(agent):
    return agent.register(pattern(NUM_BLOCKS, BLOCK_BYTES), "source", BLOCK_BYTES)


@pytest.fixture
def peer(agent, other, room, source):
    return agent.connect(other.address)


def test_written_blocks_are_at_the_peer_when_the_work_is_done(source, peer, room):
    local, remote = [7, 0, 1, 2, 63, 7], [63, 10, 11, 12, 0, 30]
    assert peer.write_blocks(source, local, "kv", remote).wait(20) == len(local) * BLOCK_BYTES
    expected = np.zeros_like(room)
    expected[remote] = pattern(NUM_BLOCKS, BLOCK_BYTES)[local]
    assert np.array_equal(room, expected)


@pytest.mark.ucx
def test_a_tag_comes_after_its_blocks_in_another_process(over_ucx, start):
    source = over_ucx.register(pattern(NUM_BLOCKS, BLOCK_BYTES), "source", BLOCK_BYTES)
    child = start("drain_notifications", NUM_BLOCKS, BLOCK_BYTES)
    peer = over_ucx.connect(child.read())
    for i in range(NUM_BLOCKS):
        peer.write_blocks(source, [i], "kv", [i], notify=str(i).encode())
    first = pattern(NUM_BLOCKS, BLOCK_BYTES)[:, 0]
    assert [child.read() for _ in range(NUM_BLOCKS)] == [f"{i} {first[i]} {peer.transport}" for i in range(NUM_BLOCKS)]


BAD_WRITES = {
    "repeated destination": ([1, 2], "kv", [5, 5], "destination block id 5 is named twice"),
    "out of range": ([1], "kv", [NUM_BLOCKS], "block id 64 is out of range"),
    "not writable": ([1], "shut", [0], '"shut" is not writable; .*writable=True'),
    "unknown": ([1], "nope", [0], 'no region "nope"; its regions'),
}


@pytest.mark.parametrize("case", BAD_WRITES)
def test_a_bad_write_is_refused_by_name_and_the_peer_stays_usable(other, source, peer, room, case):
    other.register(bytearray(BLOCK_BYTES), "shut", BLOCK_BYTES)
    wait_until(lambda: "shut" in peer.regions)
    local, region_name, remote, reason = BAD_WRITES[case]
    with pytest.raises(ConfigError, match=reason):
        peer.write_blocks(source, local, region_name, remote, notify=b"bad")
    assert not room.any()
    assert peer.write_blocks(source, [1], "kv", [0], notify=b"good").wait(20) == BLOCK_BYTES
    assert [tag for _, tag in other.notifications(20)] == [b"good"]


def test_a_plan_is_checked_once_and_moves_blocks_both_ways(source, peer, room):
    plan = peer.prepare(source, np.arange(8), "kv", np.arange(8)[::-1])
    assert repr(plan) == f"<Plan of 'source' here and 'kv' at {peer.address}>"
    assert plan.write().wait(20) == 8 * BLOCK_BYTES
    assert np.array_equal(room[:8], pattern(NUM_BLOCKS, BLOCK_BYTES)[7::-1])
    room[:] = 9
    assert plan.read().wait(20) == 8 * BLOCK_BYTES
    assert plan.write().wait(20) == 8 * BLOCK_BYTES
    assert (room == 9).all()


def test_repeated_ids_of_a_plan_matter_only_where_they_are_written(source, peer):
    plan = peer.prepare(source, [1, 1], "kv", [2, 3])
    assert plan.write().wait(20) == 2 * BLOCK_BYTES
    with pytest.raises(ConfigError, match="destination block id 1 is named twice"):
        plan.read()


def test_notifications_name_the_peer_and_come_in_order_each_once(agent, other, peer):
    for i in range(100):
        peer.notify(str(i).encode())
    seen = []
    while len(seen) < 100:
        seen += other.notifications(20)
    assert [tag for _, tag in seen] == [str(i).encode() for i in range(100)]
    wait_until(lambda: len(other.peers) == 1)
    (sender,) = other.peers
    assert {who for who, _ in seen} == {sender}
    sender.notify(b"answer").wait(20)
    assert agent.notifications(0) == [(peer, b"answer")]
    assert other.notifications(0) == []


def test_a_wait_for_notifications_ends_at_its_timeout(other):
    began = time.monotonic()
    assert other.notifications(0.05) == []
    assert time.monotonic() - began >= 0.05


def test_notifications_can_be_awaited_and_a_cancelled_wait_loses_none(other, peer):
    async def main():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await other.anotifications()
        waiting = asyncio.create_task(other.anotifications())
        await asyncio.sleep(0)
        await peer.notify(b"awaited")
        return await waiting

    assert [tag for _, tag in asyncio.run(main())] == [b"awaited"]


@pytest.mark.ucx
def test_a_sender_waits_while_the_peer_drains_nothing(over_ucx, start):
    peer = over_ucx.connect(start("never_drain_notifications", 2, BLOCK_BYTES).read())
    region = over_ucx.register(bytearray(BLOCK_BYTES), "own", BLOCK_BYTES)
    works = [peer.notify(b"tag") for _ in range(300)]
    works[255].wait(20)
    with pytest.raises(TransferTimeoutError):
        works[256].wait(0.1)
    late = peer.write_blocks(region, [0], "kv", [0], notify=b"late", timeout=0.1)
    with pytest.raises(TransferTimeoutError, match="did not begin in time; the peer is usable"):
        late.wait(20)
    assert peer.write_blocks(region, [0], "kv", [0]).wait(20) == BLOCK_BYTES


@pytest.mark.parametrize("tag", ["text", 7])
def test_a_tag_that_is_not_bytes_is_refused(peer, tag):
    with pytest.raises(ConfigError, match=f"bytes, not {type(tag).__name__}"):
        peer.notify(tag)


def test_a_tag_over_64_kib_is_refused(peer, other):
    with pytest.raises(ConfigError, match="65537 bytes, at most 65536"):
        peer.notify(bytes(65537))
    peer.notify(memoryview(bytes(65536)))
    assert other.notifications(20)[0][1] == bytes(65536)


def test_many_threads_write_and_notify_at_once(source, peer, other, room):
    def work(thread):
        for i in range(20):
            block = thread * 8 + i % 8
            assert peer.write_blocks(source, [block], "kv", [block], notify=b"w").wait(30) == BLOCK_BYTES
            peer.notify(b"n").wait(30)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    seen = []
    while len(seen) < 320:
        seen += other.notifications(30)
    for thread in threads:
        thread.join()
    assert sorted(tag for _, tag in seen) == [b"n"] * 160 + [b"w"] * 160
    assert np.array_equal(room, pattern(NUM_BLOCKS, BLOCK_BYTES))


def test_counters_count_what_was_moved(agent, source, peer):
    peer.write_blocks(source, [0, 1], "kv", [0, 1]).wait(20)
    peer.read_blocks(source, [2], "kv", [0]).wait(20)
    stats = peer.stats()
    assert (stats.bytes_written, stats.num_writes, stats.bytes_read, stats.num_reads) == (8192, 1, 4096, 1)
    assert (stats.in_flight, stats.transport) == (0, peer.transport)
    of_agent = agent.stats()
    assert (of_agent.bytes_written, of_agent.bytes_read) == (8192, 4096)
    assert (of_agent.num_peers, of_agent.num_regions) == (1, 1)
    with pytest.raises(AttributeError):
        stats.in_flight = 1


@pytest.mark.ucx
@pytest.mark.parametrize("operation", ["write", "notify"])
def test_a_peer_killed_during_a_write_or_a_notification_is_lost_within_2_s(over_ucx, start, operation):
    child = start("drain_notifications" if operation == "write" else "never_drain_notifications", 16, 1 << 20)
    region = over_ucx.register(np.zeros((16, 1 << 20), np.uint8), "own", 1 << 20)
    peer = over_ucx.connect(child.read())
    plan = peer.prepare(region, range(16), "kv", range(16))
    begin = plan.write if operation == "write" else lambda: peer.notify(b"tag")
    begin().wait(30)
    killed_at = child.kill_after(0.2)
    with contextlib.suppress(PeerLostError):
        while True:
            begin().wait()
    assert time.monotonic() - killed_at[0] < LOST_WITHIN_S
    with pytest.raises(PeerLostError, match="connect again"):
        begin()
    assert repr(peer).startswith(f"<Peer {peer.address} lost: ")


def test_closing_the_agent_ends_waits_for_notifications(other):
    def close_soon():
        time.sleep(0.1)
        other.close()

    threading.Thread(target=close_soon).start()
    with pytest.raises(ClosedError, match="the agent was closed"):
        other.notifications()
