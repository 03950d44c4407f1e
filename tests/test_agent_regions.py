"""Agent: regions that come and go, and metadata for those who bring their own exchange."""

import signal
from pathlib import Path

import numpy as np
import pytest

from kvpipe import Agent, ClosedError, ConfigError, ConnectError, RegionInfo, TransferTimeoutError
from tests.peers import wait_until

BLOCK_BYTES = 4096


def is_pinned(memory):
    """True if the bytes of a bytearray are held, so that it cannot be resized."""
    try:
        memory.append(0)
    except BufferError:
        return True
    memory.pop()
    return False


def is_stopped(pid):
    """True if every thread of a process is stopped."""
    states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


ENDS = {"closed": lambda agents: agents[0].close(), "dropped": lambda agents: agents.clear()}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_an_agent_that_is_closed_or_dropped_gives_its_memory_back_at_once(agent, end):
    memory = bytearray(2 * BLOCK_BYTES)
    agents = [Agent()]
    region = agents[0].register(memory, "kv", BLOCK_BYTES)
    own = agent.register(bytearray(BLOCK_BYTES), "own", BLOCK_BYTES)
    agent.connect(agents[0].address).read_blocks(own, [0], "kv", [1]).wait(20)
    assert is_pinned(memory)
    del region
    end(agents)
    assert not is_pinned(memory)


def test_a_region_is_a_context_manager_that_gives_its_memory_back(agent, other):
    memory = bytearray(2 * BLOCK_BYTES)
    peer = other.connect(agent.address)
    with agent.register(memory, "kv", BLOCK_BYTES) as region:
        assert repr(region) == "<Region 'kv' 2 x 4096 bytes on cpu, read-only for peers, open>"
        assert region.device == "cpu"
        wait_until(lambda: peer.regions == {"kv": RegionInfo(2, BLOCK_BYTES, "cpu", is_writable=False)})
        own = other.register(bytearray(BLOCK_BYTES), "own", BLOCK_BYTES)
        plan = peer.prepare(own, [0], "kv", [1])
        assert plan.read().wait(20) == BLOCK_BYTES
        assert is_pinned(memory)
    assert repr(region).endswith(", closed>")
    assert not is_pinned(memory)
    assert peer.regions == {}
    with pytest.raises(ConfigError, match=r'"kv" of peer .* was closed by its owner'):
        plan.read()
    with pytest.raises(ConfigError, match='no region "kv"; its regions'):
        peer.read_blocks(own, [0], "kv", [0])
    region.close()


def test_a_name_is_free_again_when_its_region_is_closed(agent, other):
    peer = other.connect(agent.address)
    own = np.zeros(BLOCK_BYTES, np.uint8)
    destination = other.register(own, "own", BLOCK_BYTES)
    for i in range(1, 21):
        with agent.register(np.full(BLOCK_BYTES, i, np.uint8), "kv", BLOCK_BYTES):
            wait_until(lambda: "kv" in peer.regions)
            peer.read_blocks(destination, [0], "kv", [0]).wait(20)
            assert (own == i).all()


def test_a_closed_region_of_ours_is_refused(agent, other):
    other.register(bytearray(BLOCK_BYTES), "kv", BLOCK_BYTES, writable=True)
    peer = agent.connect(other.address)
    region = agent.register(bytearray(BLOCK_BYTES), "own", BLOCK_BYTES)
    region.close()
    for move in (peer.read_blocks, peer.write_blocks):
        with pytest.raises(ConfigError, match='region "own" was closed; register its memory again'):
            move(region, [0], "kv", [0])


@pytest.mark.ucx
def test_a_peer_that_is_stopped_keeps_the_memory_until_it_is_lost(over_ucx, start):
    child = start("serve_blocks", 4, BLOCK_BYTES)
    over_ucx.connect(child.read())
    memory = bytearray(BLOCK_BYTES)
    region = over_ucx.register(memory, "kv", BLOCK_BYTES)
    child.process.send_signal(signal.SIGSTOP)
    wait_until(lambda: is_stopped(child.process.pid))
    with pytest.raises(TransferTimeoutError, match=r'"kv" may still be read by .*127\.0\.0\.1'):
        region.close(timeout=0.3)
    assert region.is_closed
    assert is_pinned(memory)
    child.process.kill()

    def is_given_back():
        over_ucx.notifications(0)
        with over_ucx.register(bytearray(8), "another", 8):
            pass
        return not is_pinned(memory)

    wait_until(is_given_back)


def test_a_region_of_another_agent_is_refused(agent, other):
    other.register(bytearray(BLOCK_BYTES), "kv", BLOCK_BYTES)
    peer = agent.connect(other.address)
    foreign = other.register(bytearray(BLOCK_BYTES), "foreign", BLOCK_BYTES)
    with pytest.raises(ConfigError, match='"foreign" is registered with another agent'):
        peer.read_blocks(foreign, [0], "kv", [0])


def test_what_is_closed_says_so(agent, other):
    other.register(bytearray(BLOCK_BYTES), "kv", BLOCK_BYTES, writable=True)
    peer = agent.connect(other.address)
    region = agent.register(bytearray(BLOCK_BYTES), "own", BLOCK_BYTES)
    plan = peer.prepare(region, [0], "kv", [0])
    agent.close()
    tries = (
        plan.read,
        plan.write,
        lambda: peer.prepare(region, [0], "kv", [0]),
        lambda: peer.notify(b"tag"),
        lambda: agent.register(bytearray(8), "late", 8),
        lambda: agent.connect(other.address),
        lambda: agent.notifications(0),
    )
    for attempt in tries:
        with pytest.raises(ClosedError, match="closed"):
            attempt()
    region.close()


def test_metadata_leads_to_its_agent_and_to_no_successor(agent, other):
    metadata = other.metadata()
    peer = agent.add_peer(metadata)
    assert agent.add_peer(metadata) == peer == agent.connect(other.address)
    assert agent.peers == [peer]
    address = other.address
    other.close()
    wait_until(lambda: agent.peers == [])
    with pytest.raises(ConnectError, match=address):
        agent.add_peer(metadata)
    with Agent(listen=address), pytest.raises(ConnectError, match="has been restarted; get its metadata again"):
        agent.add_peer(metadata)


@pytest.mark.parametrize("metadata", [b"", b"nonsense", b"KVPA\x01\x00", bytes(1 << 20)])
def test_bytes_that_are_no_metadata_are_refused(agent, metadata):
    with pytest.raises(ConfigError, match="no metadata of an agent"):
        agent.add_peer(metadata)


def test_metadata_of_another_version_is_named(agent, other):
    metadata = bytearray(other.metadata())
    metadata[4] = 9
    with pytest.raises(ConfigError, match="version 9"):
        agent.add_peer(bytes(metadata))


def test_accepted_peers_are_peers_too(agent, other):
    peer = agent.connect(other.address)
    wait_until(lambda: len(other.peers) == 1)
    (accepted,) = other.peers
    agent.register(b := bytearray(BLOCK_BYTES), "kv", BLOCK_BYTES)
    b[:] = b"x" * BLOCK_BYTES
    own = bytearray(BLOCK_BYTES)
    region = other.register(own, "own", BLOCK_BYTES)
    wait_until(lambda: "kv" in accepted.regions)
    accepted.read_blocks(region, [0], "kv", [0]).wait(20)
    assert own == b
    assert accepted != peer
    assert accepted == other.peers[0]
    assert hash(accepted) == hash(other.peers[0])
