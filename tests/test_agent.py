"""Agent: blocks of one process, read into blocks of another."""

import array
import contextlib
import functools
import time

import numpy as np
import pytest

from kvpipe import (
    Agent,
    AuthenticationError,
    ClosedError,
    ConfigError,
    ConnectError,
    IncompatiblePeerError,
    PeerLostError,
    Pipe,
    RegionInfo,
    TransferTimeoutError,
)
from tests.conftest import DATA_PATHS
from tests.peers import pattern, serving, wait_until

NUM_BLOCKS, BLOCK_BYTES = 300, 4096
LOST_WITHIN_S = 2.0


@pytest.fixture(scope="module")
def start_server(start_for_module):
    """Starts an agent in another process once for each data path; see `tests.peers.serve_blocks`."""
    return functools.cache(lambda _: start_for_module("serve_blocks", NUM_BLOCKS, BLOCK_BYTES).read())


@pytest.fixture
def served(transport, start_server):
    """The address of an agent: in another process, or in memory in this one."""
    if transport in DATA_PATHS:
        yield start_server(transport)
    else:
        with serving(NUM_BLOCKS, BLOCK_BYTES) as server:
            yield server.address


@pytest.fixture
def peer(agent, served):
    return agent.connect(served)


@pytest.fixture
def blocks():
    return np.zeros((NUM_BLOCKS, BLOCK_BYTES // 4), np.uint32)


def test_a_peer_reports_its_regions_and_its_transport(peer, served, transport):
    assert peer.regions == {
        "kv": RegionInfo(NUM_BLOCKS, BLOCK_BYTES, "cpu", is_writable=True),
        "strided": RegionInfo(NUM_BLOCKS, BLOCK_BYTES, "cpu", is_writable=False),
    }
    assert peer.address == served
    assert peer.transport == {"default": "cma", "memory": "memory"}.get(transport, "tcp")
    assert repr(peer) == f"<Peer {served} transport={peer.transport}, 2 regions>"


def test_scattered_blocks_land_where_they_were_asked_for_and_nowhere_else(agent, peer, blocks):
    region = agent.register(blocks, "kv", BLOCK_BYTES)
    local, remote = [7, 0, 1, 2, 250, 9], [299, 10, 11, 12, 0, 10]
    assert peer.read_blocks(region, local, "kv", remote).wait(20) == len(local) * BLOCK_BYTES
    expected = np.zeros_like(blocks)
    expected[local] = pattern(NUM_BLOCKS, BLOCK_BYTES)[remote]
    assert np.array_equal(blocks, expected)


@pytest.mark.parametrize("chunk", [1, 17, NUM_BLOCKS])
def test_all_blocks_in_random_order(agent, peer, blocks, chunk):
    region = agent.register(blocks, "kv", BLOCK_BYTES)
    random = np.random.default_rng(0)
    local, remote = random.permutation(NUM_BLOCKS), random.permutation(NUM_BLOCKS)
    starts = range(0, NUM_BLOCKS, chunk)
    works = [peer.read_blocks(region, local[i : i + chunk], "kv", remote[i : i + chunk]) for i in starts]
    assert sum(work.wait(30) for work in works) == blocks.nbytes
    assert np.array_equal(blocks[local], pattern(NUM_BLOCKS, BLOCK_BYTES)[remote])


def test_strides_of_both_sides_are_respected(agent, peer):
    room = np.zeros((20, 3 * BLOCK_BYTES // 4), np.uint32)
    region = agent.register(room, "wide", BLOCK_BYTES, stride=3 * BLOCK_BYTES)
    assert region.num_blocks == 20
    peer.read_blocks(region, [3, 4, 19], "strided", [5, 6, 299]).wait(20)
    source = pattern(NUM_BLOCKS, 2 * BLOCK_BYTES)[:, : BLOCK_BYTES // 4]
    expected = np.zeros_like(room)
    expected[[3, 4, 19], : BLOCK_BYTES // 4] = source[[5, 6, 299]]
    assert np.array_equal(room, expected)


def test_torch_tensors_and_plain_buffers_are_regions_too(agent, peer):
    torch = pytest.importorskip("torch")
    for memory in (torch.zeros(2, BLOCK_BYTES, dtype=torch.uint8), bytearray(2 * BLOCK_BYTES)):
        region = agent.register(memory, type(memory).__name__, BLOCK_BYTES)
        peer.read_blocks(region, [1], "kv", [8]).wait(20)
        content = bytes(memory if isinstance(memory, bytearray) else memory.numpy().tobytes())
        assert content == bytes(BLOCK_BYTES) + pattern(NUM_BLOCKS, BLOCK_BYTES)[8].tobytes()


SPELLINGS = {
    "list": list,
    "tuple": tuple,
    "generator": lambda ids: (i for i in ids),
    "range": lambda ids: range(ids[0], ids[-1] - 1, -1),
    "int64": np.array,
    "int32": lambda ids: np.array(ids, np.int32),
    "uint32": lambda ids: np.array(ids, np.uint32),
    "uint64": lambda ids: np.array(ids, np.uint64),
    "uint8": lambda ids: np.array(ids, np.uint8),
    "every second": lambda ids: np.repeat(ids, 2)[::2],
    "array": lambda ids: array.array("H", ids),
    "torch": lambda ids: pytest.importorskip("torch").tensor(ids),
    "torch int32": lambda ids: pytest.importorskip("torch").tensor(ids).int(),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_ids_may_be_any_sequence_or_array_of_integers(agent, peer, blocks, spelling):
    region = agent.register(blocks, "kv", BLOCK_BYTES)
    ids = SPELLINGS[spelling]([9, 8, 7])
    peer.read_blocks(region, [0, 1, 2], "kv", ids).wait(20)
    assert np.array_equal(blocks[:3], pattern(NUM_BLOCKS, BLOCK_BYTES)[[9, 8, 7]])


def test_reading_nothing_is_done_at_once(agent, peer, blocks):
    region = agent.register(blocks, "kv", BLOCK_BYTES)
    assert peer.read_blocks(region, [], "kv", []).wait(10) == 0


BAD_READS = {
    "destination out of range": ([NUM_BLOCKS], "kv", [0], 'block id 300 is out of range: region "kv" has 300 blocks'),
    "source out of range": ([0], "strided", [NUM_BLOCKS], 'block id 300 is out of range: region "strided" has 300'),
    "negative": ([-1], "kv", [0], "block id -1 is out of range"),
    "repeated destination": ([4, 5, 4], "kv", [1, 2, 3], "destination block id 4 is named twice"),
    "different numbers": ([4, 5], "kv", [1], "2 local ids for 1 remote ids"),
    "unknown region": ([0], "nope", [0], r'no region "nope"; its regions: ."kv", "strided".'),
    "over 32 bits": ([1 << 32], "kv", [0], "block id 4294967296 is out of range"),
    "over 64 bits": ([1 << 64], "kv", [0], "block ids: "),
    "negative in an array": (np.array([3, -1]), "kv", [0, 1], "block id -1 is out of range"),
    "negative in a range": (range(2, -2, -1), "kv", [0, 1, 2, 3], "block id -1 is out of range"),
    "fractions in an array": (np.array([0.5]), "kv", [0], "block ids: 'numpy.float64'"),
    "two dimensions": (np.array([[1]]), "kv", [0], "an array of 2 dimensions"),
    "no sequence": (7, "kv", [0], "block ids: 'int' object is not iterable"),
    "fraction": ([0.5], "kv", [0], "block ids: 'float'"),
    "text": (["a"], "kv", [0], "block ids: 'str'"),
}


@pytest.mark.parametrize("case", BAD_READS)
def test_a_bad_read_is_refused_by_name_and_the_peer_stays_usable(agent, peer, blocks, case):
    local, region_name, remote, reason = BAD_READS[case]
    region = agent.register(blocks, "kv", BLOCK_BYTES)
    with pytest.raises(ConfigError, match=reason):
        peer.read_blocks(region, local, region_name, remote).wait(10)
    assert peer.read_blocks(region, [0], "kv", [3]).wait(10) == BLOCK_BYTES
    assert not blocks[1:].any()


def test_blocks_of_another_size_are_refused(agent, peer, blocks):
    region = agent.register(blocks, "small", BLOCK_BYTES // 2)
    with pytest.raises(ConfigError, match=r"2048.*4096|4096.*2048"):
        peer.read_blocks(region, [0], "kv", [0]).wait(10)


def _read_only():
    array = np.zeros(BLOCK_BYTES)
    array.flags.writeable = False
    return array


BAD_REGIONS = {
    "no bytes a block": (bytearray(10), 0, None, "block_bytes=0"),
    "negative": (bytearray(10), -1, None, "block_bytes=-1"),
    "stride below size": (bytearray(10), 4, 3, "block_bytes=4 with stride=3"),
    "too small": (bytearray(10), 11, None, "10 bytes hold no block of 11 bytes"),
    "strided": (np.zeros(10)[::2], 8, None, "contiguous"),
    "read-only": (_read_only(), 8, None, "read-only"),
    "read-only bytes": (b"12345678", 8, None, "read-only"),
    "no memory": (None, 8, None, "cannot register NoneType"),
}


@pytest.mark.parametrize("case", BAD_REGIONS)
def test_a_bad_region_is_refused_with_the_reason(agent, case):
    memory, block_bytes, stride, reason = BAD_REGIONS[case]
    with pytest.raises(ConfigError, match=reason):
        agent.register(memory, "kv", block_bytes, stride)


def test_a_name_is_given_once(agent, blocks):
    agent.register(blocks, "kv", BLOCK_BYTES)
    with pytest.raises(ConfigError, match='there is a region "kv" already'):
        agent.register(blocks, "kv", BLOCK_BYTES)


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_name_that_peers_would_refuse_is_refused(agent, name):
    with pytest.raises(ConfigError, match="name"):
        agent.register(bytearray(8), name, 8)


def test_regions_registered_after_the_connection_can_be_read(agent):
    with Agent() as late:
        peer = agent.connect(late.address)
        assert peer.regions == {}
        late.register(np.full(8, 7, np.uint8), "late", 8)
        destination = bytearray(8)
        region = agent.register(destination, "here", 8)
        wait_until(lambda: peer.regions == {"late": RegionInfo(1, 8, "cpu", is_writable=False)})
        peer.read_blocks(region, [0], "late", [0]).wait(10)
        assert destination == bytes([7] * 8)


def test_both_sides_may_read_from_each_other_at_once(agent):
    with Agent() as other:
        agents, works = (agent, other), []
        memory = [np.full((64, 65536), i + 1, np.uint8) for i in range(2)]
        room = [np.zeros_like(memory[0]) for _ in range(2)]
        for i, one in enumerate(agents):
            one.register(memory[i], "source", 65536)
        for i, one in enumerate(agents):
            region = one.register(room[i], "destination", 65536)
            peer = one.connect(agents[1 - i].address)
            works += [peer.read_blocks(region, range(64), "source", range(63, -1, -1)) for _ in range(5)]
        assert [work.wait(30) for work in works] == [memory[0].nbytes] * 10
        assert (room[0] == 2).all()
        assert (room[1] == 1).all()


@pytest.mark.ucx
def test_a_peer_that_is_killed_is_lost_within_2_s_and_its_successor_is_another(data_path, start):
    agent = Agent()
    child = start("serve_blocks", 64, 1 << 20)
    region = agent.register(np.zeros((64, 1 << 20), np.uint8), "kv", 1 << 20)
    peer = agent.connect(child.read())
    peer.read_blocks(region, range(64), "kv", range(64)).wait(30)
    killed_at = child.kill_after(0.2)
    with contextlib.suppress(PeerLostError):
        while True:
            peer.read_blocks(region, range(64), "kv", range(64)).wait()
    assert time.monotonic() - killed_at[0] < LOST_WITHIN_S
    with pytest.raises(PeerLostError, match="connect again"):
        peer.read_blocks(region, [0], "kv", [0]).wait(10)
    assert "lost: " in repr(peer)
    assert agent.peers == []
    again = agent.connect(start("serve_blocks", 64, 1 << 20).read())
    assert again.read_blocks(region, range(64), "kv", range(64)).wait(30) == 64 << 20
    agent.close()


def test_an_agent_that_is_not_there_is_a_connect_error_with_the_address(agent):
    with Agent() as gone:
        address = gone.address
    with pytest.raises(ConnectError, match=address):
        agent.connect(address)


def test_a_wrong_token_is_refused(agent):
    with Agent(token="secret") as other, pytest.raises(AuthenticationError, match="KVPIPE_TOKEN"):
        agent.connect(other.address)


def test_an_agent_and_a_pipe_refuse_each_other_by_name(agent):
    with Pipe.listen() as receiver, pytest.raises(IncompatiblePeerError, match='"Agent" here and "Pipe" there'):
        agent.connect(receiver.address)


def test_close_ends_the_agent(agent, new_threads):
    threads = new_threads()
    other = Agent()
    assert repr(other) == f"<Agent {other.address} 0 peers, 0 regions, 0 in flight>"
    other.close()
    other.close()
    assert repr(other) == f"<Agent {other.address} closed>"
    wait_until(lambda: not threads())  # the kernel lists one a moment longer than its join takes
    with pytest.raises(ClosedError):
        other.connect(agent.address)


@pytest.mark.ucx
def test_a_late_read_fails_alone_and_its_blocks_are_free_when_it_is_settled(transport, agent, start):
    if transport not in DATA_PATHS:
        pytest.skip("the memory of one process is no other process's")
    num_bytes = 64 << 20
    peer = agent.connect(start("serve_blocks", 2, num_bytes).read())
    blocks = np.zeros((2, num_bytes // 4), np.uint32)
    region = agent.register(blocks, "mine", num_bytes)
    num_late = 0
    for _ in range(5):
        healthy = peer.read_blocks(region, [0], "kv", [0])
        late = peer.read_blocks(region, [1], "kv", [1], timeout=0.003)
        with contextlib.suppress(TransferTimeoutError):
            late.wait(20)
            continue
        num_late += 1
        assert healthy.wait(20) == num_bytes
        late.settled(20)
        assert peer.read_blocks(region, [1], "kv", [1]).wait(20) == num_bytes
        assert (blocks == pattern(2, num_bytes)).all()
        blocks[:] = 0
    assert num_late > 0
