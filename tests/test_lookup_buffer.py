"""LookupBuffer: what matches, who gets it, capacity, waits. See also test_lookup_servers and test_lookup_processes."""

import asyncio
import contextlib
import threading
import time

import numpy as np
import pytest

from kvpipe import (
    AuthenticationError,
    CapacityError,
    ClosedError,
    ConfigError,
    ConnectError,
    LookupBuffer,
    LookupBufferStats,
    PeerLostError,
)
from tests.peers import MIB, resident_bytes

pytestmark = pytest.mark.ucx

NOTHING = [None] * 5
TIMEOUT_S = 30
TOKENS = np.arange(10)


@pytest.fixture(params=["local", "remote"])
def place(request):
    """A buffer of 1 MiB, and the same as its server sees it: in one process, or a client of it."""
    with LookupBuffer(MIB) as server:
        if request.param == "local":
            yield server, server
        else:
            server.serve()
            with LookupBuffer.connect(server.address) as client:
                yield client, server


@pytest.fixture
def buffer(place):
    return place[0]


def insert(buffer, tokens, key=None, **options):
    buffer.insert(np.array(tokens), None, key, None, None, **options)


def select(buffer, tokens, timeout=0):
    """The tokens of the entry that is taken."""
    taken = buffer.drop_select(None if tokens is None else np.array(tokens), None, timeout=timeout)[0]
    return None if taken is None else taken.tolist()


def eventually(is_so):
    give_up_at = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < give_up_at, "not seen in time"
        time.sleep(0.002)


def in_thread(call):
    """Runs a call in another thread; the list then holds its result or its exception."""
    ended = []

    def run():
        try:
            ended.append(call())
        except Exception as error:  # noqa: BLE001 - the test asks which
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, ended


def finish(thread, ended):
    thread.join(TIMEOUT_S)
    assert ended, "it hangs"
    return ended[0]


# --- what goes in comes out -------------------------------------------------------------------------------------


def same(a, b):
    if a is None or b is None:
        return a is b
    return type(a) is type(b) and a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


SIZES = [1, 7, 4096, 100_000, 5 * MIB]


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("is_remote", [False, True])
def test_an_entry_comes_out_as_it_went_in(is_remote):
    torch = pytest.importorskip("torch")  # the other tests do without

    entries = [
        [torch.arange(3), torch.tensor([True, False, True]), torch.ones(2, 3, dtype=torch.bfloat16), None, None],
        [np.arange(3, dtype=np.uint16), None, np.zeros((0, 4)), np.array(3.0, np.float16), np.array([True])],
        *([TOKENS, None, np.arange(size, dtype=np.uint8), None, np.ones(size // 4)] for size in SIZES),
        [torch.arange(20_000), torch.ones(20_000, dtype=torch.bool), *(torch.rand(3, MIB // 4) for _ in range(3))],
    ]
    with contextlib.ExitStack() as stack:
        buffer = stack.enter_context(LookupBuffer())
        if is_remote:
            buffer.serve()
            buffer = stack.enter_context(LookupBuffer.connect(buffer.address))
        for entry in entries:
            buffer.insert(*entry)
        for entry in entries:
            taken = buffer.drop_select(None, None, timeout=TIMEOUT_S)
            assert all(same(a, b) for a, b in zip(taken, entry, strict=True)), (taken, entry)
        assert buffer.drop_select(None, None, timeout=0) == NOTHING


@pytest.mark.parametrize("size", [10, MIB // 2])
def test_insert_copies(buffer, size):
    key = np.zeros(size, np.uint8)
    insert(buffer, [1], key)
    key += 1
    taken = buffer.drop_select(None, None)[2]
    assert not taken.any()
    taken += 1  # it is writable, and its own


def test_a_tensor_that_is_not_contiguous_is_kept_as_it_reads(buffer):
    key = np.arange(600).reshape(20, 30).T[::2]
    insert(buffer, [1], key)
    assert np.array_equal(buffer.drop_select(None, None)[2], key)


def test_consumed_tensors_outlive_the_buffer():
    with LookupBuffer() as buffer:
        insert(buffer, [1], np.arange(1000))
        key = buffer.drop_select(None, None)[2]
    assert np.array_equal(key, np.arange(1000))


@pytest.mark.parametrize("is_remote", [False, True])
def test_memory_is_used_again_but_not_while_it_is_held(is_remote):
    num_entries, size = 16, 8 * MIB
    with contextlib.ExitStack() as stack:
        buffer = stack.enter_context(LookupBuffer())
        if is_remote:
            buffer.serve()
            buffer = stack.enter_context(LookupBuffer.connect(buffer.address))
        held, weights = [], []
        for i in range(num_entries):
            insert(buffer, [1], np.full(size, i, np.uint8))
            held.append((i, buffer.drop_select(None, None)[2]))
            if len(held) == 3:
                held.pop(0)
            assert all(key.min() == i == key.max() for i, key in held)
            weights.append(resident_bytes())
        assert weights[-1] - weights[5] < 4 * size


# --- what matches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([1, 2, 3, 4, 5], [1, 2, 3]),
        ([1, 2], [1, 2, 3]),  # a match of two with all three; the oldest of those
        ([1, 2, 7, 7, 7], [1, 2, 7, 7]),
        ([1, 9], [1]),
        ([2], None),
        ([0, 1, 2, 3], None),
        (None, [1, 2, 3]),
    ],
)
def test_the_longest_match_wins_then_the_oldest(buffer, query, expected):
    for tokens in ([1, 2, 3], [1], [1, 2, 7, 7], [1, 2]):
        insert(buffer, tokens)
    assert select(buffer, query) == expected


def test_of_equal_matches_the_oldest_comes_first(buffer):
    for i in range(5):
        insert(buffer, [1, 2, i])
    assert [select(buffer, [1, 2])[2] for _ in range(5)] == list(range(5))


def test_only_tokens_under_the_roi_count(buffer):
    mask = np.array([False, True, True, False])
    buffer.insert(np.array([9, 1, 2, 9]), mask, None, None, None)
    assert select(buffer, [9, 1]) is None
    taken = buffer.drop_select(np.array([1, 5, 2]), np.array([True, False, True]), timeout=0)
    assert taken[0].tolist() == [9, 1, 2, 9]
    assert taken[1].tolist() == mask.tolist()


def test_tokens_match_whatever_their_dtype_and_library(buffer):
    torch = pytest.importorskip("torch")  # the other tests do without

    tokens = [3, 1, 4]
    for stored in (np.array(tokens, np.uint8), torch.tensor(tokens, dtype=torch.int32), np.array(tokens)[::1]):
        for query in (np.array(tokens, np.int16), torch.tensor(tokens), np.array([4, 1, 3])[::-1]):
            buffer.insert(stored, None, None, None, None)
            assert same(buffer.drop_select(query, None, timeout=0)[0], stored)


def test_an_entry_is_consumed_once(buffer):
    insert(buffer, [1, 2])
    assert select(buffer, [1]) == [1, 2]
    assert select(buffer, [1]) is None
    assert select(buffer, None) is None


def test_nothing_is_five_nones(buffer):
    insert(buffer, [1])
    assert buffer.drop_select(np.array([2]), None, timeout=0) == NOTHING
    assert buffer.drop_select(np.array([2]), None, timeout=0.05) == NOTHING


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "roi", "text"),
    [
        (TOKENS, np.zeros(10, bool), "no tokens under its roi"),
        (np.zeros(0, int), None, "no tokens under its roi"),
        (TOKENS, np.ones(9, bool), r"roi: expected \[10\] of bool like input_tokens, got \[9\] of bool"),
        (TOKENS, TOKENS, r"roi: expected \[10\] of bool"),
        (TOKENS.reshape(2, 5), None, r"input_tokens: expected \[num_tokens\] of integers, got \[2, 5\]"),
        (TOKENS / 2, None, "of integers, got .* of float64"),
        ([1, 2], None, "expected a torch tensor"),
        (TOKENS, [True], "expected a torch tensor"),
    ],
)
def test_bad_tokens_are_named_and_change_nothing(buffer, tokens, roi, text):
    for attempt in (
        lambda: buffer.insert(tokens, roi, None, None, None),
        lambda: buffer.drop_select(tokens, roi, timeout=0),
    ):
        with pytest.raises(ConfigError, match=text):
            attempt()
    insert(buffer, [1])
    assert select(buffer, [1]) == [1]


def test_an_entry_without_tokens_is_refused(buffer):
    with pytest.raises(ConfigError, match="input_tokens: expected a torch tensor or a numpy array, got NoneType"):
        buffer.insert(None, None, None, None, None)
    with pytest.raises(ConfigError, match="roi without input_tokens"):
        buffer.drop_select(None, np.ones(1, bool))


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("-inf")])
def test_a_bad_timeout_is_named(buffer, timeout):
    with pytest.raises(ConfigError, match="timeout="):
        insert(buffer, [1], timeout=timeout)
    with pytest.raises(ConfigError, match="timeout="):
        select(buffer, [1], timeout)
    assert select(buffer, None) is None


@pytest.mark.parametrize("capacity_bytes", [0, -1, 1.5, "1"])
def test_a_bad_capacity_is_named(capacity_bytes):
    with pytest.raises(ConfigError, match="capacity_bytes="):
        LookupBuffer(capacity_bytes)


# --- waits ------------------------------------------------------------------------------------------------------


def test_a_select_waits_for_its_entry(place):
    buffer, server = place
    waiting = in_thread(lambda: select(buffer, [5, 6], None))
    eventually(lambda: server.stats().num_waiting == 1)
    insert(buffer, [9])
    insert(buffer, [5])
    assert finish(*waiting) == [5]
    assert select(buffer, None) == [9]


def test_selects_are_served_in_the_order_of_asking(buffer):
    works = [buffer.idrop_select(None, None) for _ in range(20)]
    for i in range(20):
        insert(buffer, [i])
    assert [work.wait(TIMEOUT_S)[0][0] for work in works] == list(range(20))


def test_a_select_that_expired_or_was_dropped_consumes_nothing(place):
    buffer, server = place
    assert select(buffer, [1], 0.05) is None
    work = buffer.idrop_select(None, None)
    eventually(lambda: server.stats().num_waiting == 1)
    del work
    eventually(lambda: server.stats().num_waiting == 0)
    insert(buffer, [1])
    assert server.stats().num_entries == 1
    assert select(buffer, [1]) == [1]


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("size", [4, 100_000])
def test_a_peek_returns_the_entry_that_would_be_consumed_and_leaves_it_in_its_place(place, size):
    buffer, server = place
    insert(buffer, [1], np.full(size, 1, np.uint8))
    insert(buffer, [2], np.full(size, 2, np.uint8))
    for _ in range(2):
        assert np.array_equal(buffer.peek(None, None, timeout=TIMEOUT_S)[2], np.full(size, 1, np.uint8))
    assert buffer.peek(np.array([2]), None, timeout=TIMEOUT_S)[0].tolist() == [2]
    assert buffer.peek(np.array([3]), None, timeout=0) == NOTHING
    eventually(lambda: server.stats().num_entries == 2)
    assert server.stats().num_taken == 0
    assert [select(buffer, None, TIMEOUT_S) for _ in range(2)] == [[1], [2]]


@pytest.mark.parametrize("size", [1, MIB // 4])
def test_an_unread_entry_goes_back_to_its_old_place(place, size):
    buffer, server = place
    for i in range(3):
        insert(buffer, [1, i], np.ones(size, np.uint8))
    works = [buffer.idrop_select(np.array([1]), None) for _ in range(2)]
    eventually(lambda: all(work.is_completed() for work in works))
    assert server.stats().num_leased == 2
    works.clear()
    eventually(lambda: server.stats().num_entries == 3)
    assert [select(buffer, [1])[1] for _ in range(3)] == [0, 1, 2]


def test_an_expired_wait_of_a_work_cancels_nothing(buffer):
    work = buffer.idrop_select(None, None)
    with pytest.raises(TimeoutError, match="the operation continues"):
        work.wait(0.01)
    insert(buffer, [1])
    assert work.wait(TIMEOUT_S)[0].tolist() == [1]
    assert work.result() is work.result()


def test_waiting_burns_no_cpu(place):
    buffer, server = place
    waiting = in_thread(lambda: select(buffer, [1], None))
    eventually(lambda: server.stats().num_waiting == 1)
    time.sleep(0.2)
    before = time.process_time()
    time.sleep(1)
    burnt_s = time.process_time() - before
    insert(buffer, [1])
    finish(*waiting)
    assert burnt_s < 0.1


# --- capacity ---------------------------------------------------------------------------------------------------


HALF = np.ones(MIB // 2, np.uint8)
MOST = np.ones(MIB - 3000, np.uint8)  # beside it no other entry has place
BOOKKEEPING_BYTES = 2048


def test_an_insert_above_the_capacity_waits_for_place(place):
    buffer, server = place
    insert(buffer, [1], MOST)
    waiting = in_thread(lambda: insert(buffer, [2], MOST))
    eventually(lambda: server.stats().num_waiting == 1)
    assert server.stats().num_bytes <= MIB
    assert select(buffer, [1]) == [1]
    assert finish(*waiting) is None
    assert select(buffer, [2]) == [2]


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_without_place_in_time_an_insert_is_a_capacity_error_and_nothing_is_inserted(place, timeout):
    buffer, server = place
    insert(buffer, [1], MOST)
    with pytest.raises(CapacityError, match=r"no place for (\d+) bytes in time: \1 of 1048576 are taken"):
        insert(buffer, [2], MOST, timeout=timeout)
    assert server.stats().num_waiting == 0
    assert select(buffer, [1]) == [1]
    eventually(lambda: server.stats().num_bytes == 0)
    insert(buffer, [2], MOST, timeout=0)


def test_an_entry_larger_than_the_capacity_is_an_error_with_both_numbers(buffer):
    with pytest.raises(ConfigError, match=r"an entry of 105\d{4} bytes can never be inserted: .* is 1048576 bytes"):
        insert(buffer, [1], np.ones(MIB, np.uint8))
    assert select(buffer, None) is None


def test_an_entry_counts_its_tensors_with_dtypes_and_shapes_its_tokens_and_bookkeeping(place):
    buffer, server = place
    tokens, roi, key = np.arange(4), np.array([True, True, False, True]), np.ones((5, 6), np.uint8)
    buffer.insert(tokens, roi, key, None, None)
    tensors = sum(tensor.nbytes + len(repr(tensor.dtype.str)) + 8 * tensor.ndim for tensor in (tokens, roi, key))
    assert server.stats().num_bytes == tensors + 8 * 3 + BOOKKEEPING_BYTES


def test_an_entry_of_many_tokens_and_small_tensors_waits_for_place(place):
    buffer, server = place
    few = np.zeros(0, np.int8)
    many = np.ones(MIB // 16, np.int8)
    buffer.insert(many, None, few, None, None)
    with pytest.raises(CapacityError, match="no place"):
        buffer.insert(many, None, few, None, None, timeout=0)
    assert server.stats().num_bytes > many.size * 8
    with pytest.raises(ConfigError, match="can never be inserted"):
        buffer.insert(np.ones(MIB // 8, np.int8), None, few, None, None)


def test_waiting_inserts_get_their_place_in_order(place):
    buffer, server = place
    insert(buffer, [0], MOST)
    works = []
    for i in range(1, 6):
        works.append(buffer.iinsert(np.array([i]), None, MOST if i == 1 else HALF[:1000], None, None))
        eventually(lambda num=i: server.stats().num_waiting == num)
    assert not any(work.is_completed() for work in works)  # the small ones do not overtake
    assert select(buffer, None) == [0]
    works[0].wait(TIMEOUT_S)
    assert not any(work.is_completed() for work in works[1:])
    assert [select(buffer, None, TIMEOUT_S)[0] for _ in range(5)] == [1, 2, 3, 4, 5]
    for work in works:
        assert work.wait(TIMEOUT_S) is None


def test_many_inserts_at_once_all_get_their_place(place):
    buffer, server = place
    works = [buffer.iinsert(np.array([i]), None, HALF[:100_000], None, None) for i in range(200)]
    assert [select(buffer, None, TIMEOUT_S)[0] for _ in range(200)] == list(range(200))
    for work in works:
        work.wait(TIMEOUT_S)
    eventually(lambda: server.stats().num_bytes == 0)


def test_threads_may_insert_and_select_at_once(place):
    buffer, server = place
    num_threads, num_each = 4, 100

    def insert_some(first):
        for i in range(num_each):
            insert(buffer, [first + i], HALF[: 50_000 if i % 10 == 0 else 10])

    def consume_some():
        return [select(buffer, None, TIMEOUT_S)[0] for _ in range(num_each)]

    producers = [in_thread(lambda first=1000 * i: insert_some(first)) for i in range(num_threads)]
    consumers = [in_thread(consume_some) for _ in range(num_threads)]
    assert [finish(*producer) for producer in producers] == [None] * num_threads
    taken = [number for consumer in consumers for number in finish(*consumer)]
    assert sorted(taken) == [1000 * i + n for i in range(num_threads) for n in range(num_each)]
    eventually(lambda: server.stats().num_taken == num_threads * num_each)


# --- asyncio ----------------------------------------------------------------------------------------------------


def run(scene):
    """Runs a coroutine to its end; one that would hang fails."""

    async def bounded():
        async with asyncio.timeout(TIMEOUT_S):
            await scene()

    asyncio.run(bounded())


def test_works_can_be_awaited_without_a_thread(buffer):
    async def scene():
        before = set(threading.enumerate())
        selects = [asyncio.ensure_future(wait(buffer.idrop_select(np.array([i]), None))) for i in range(10)]
        await asyncio.sleep(0)
        for i in reversed(range(10)):
            await buffer.iinsert(np.array([i]), None, HALF, None, None)
        assert [int((await task)[0][0]) for task in selects] == list(range(10))
        assert set(threading.enumerate()) <= before

    async def wait(work):
        return await work

    run(scene)


def test_a_cancelled_await_consumes_nothing(place):
    buffer, server = place

    async def wait():
        return await buffer.idrop_select(None, None)

    async def scene():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wait(), 0.05)

    run(scene)
    eventually(lambda: server.stats().num_waiting == 0)
    insert(buffer, [1])
    assert select(buffer, None) == [1]


# --- closing and connecting -------------------------------------------------------------------------------------


def test_close_ends_waits_and_later_calls_raise_closed_error(place):
    buffer, server = place
    waiting = in_thread(lambda: select(buffer, [1], None))
    eventually(lambda: server.stats().num_waiting == 1)
    buffer.close()
    buffer.close()
    assert isinstance(finish(*waiting), ClosedError)
    for attempt in (lambda: select(buffer, None), lambda: insert(buffer, [1])):
        with pytest.raises(ClosedError, match="closed"):
            attempt()
    assert "closed" in repr(buffer)


def test_a_client_that_closes_leaves_nothing_behind():
    with LookupBuffer() as server:
        server.serve()
        insert(server, [1])
        client = LookupBuffer.connect(server.address)
        works = [client.idrop_select(np.array([2]), None) for _ in range(3)]
        eventually(lambda: server.stats().num_waiting == 3)
        client.close()
        eventually(lambda: server.stats().num_waiting == 0)
        for work in works:
            with pytest.raises(ClosedError):
                work.result()
        assert server.stats().num_entries == 1


def test_a_servers_close_is_a_lost_peer_for_its_clients():
    server = LookupBuffer()
    server.serve()
    with LookupBuffer.connect(server.address) as client:
        waiting = in_thread(lambda: select(client, [1], None))
        eventually(lambda: server.stats().num_waiting == 1)
        server.close()
        assert isinstance(finish(*waiting), PeerLostError)
        for attempt in (lambda: select(client, None), lambda: insert(client, [1])):
            with pytest.raises(PeerLostError, match="it closed"):
                attempt()


def test_a_dropped_buffer_ends_its_thread(new_threads):
    threads = new_threads()
    server = LookupBuffer()
    assert not threads()  # in one process it needs none
    server.serve()
    client = LookupBuffer.connect(server.address)
    assert threads()
    del server, client
    eventually(lambda: not threads())  # the one that connected ends by itself


def test_a_wrong_token_is_refused():
    with LookupBuffer() as server:
        server.serve(token="right")
        for token in ("wrong", None):
            with pytest.raises(AuthenticationError):
                LookupBuffer.connect(server.address, token=token)
        with LookupBuffer.connect(server.address, token="right") as client:
            insert(client, [1])


def test_a_port_without_a_listener_is_a_connect_error_with_the_address():
    with LookupBuffer() as server, LookupBuffer() as other:
        server.serve()
        other.serve()
        address = server.address
        server.close()
        with pytest.raises(ConnectError, match=address):
            LookupBuffer.connect(other.address, address, timeout=5)
    with pytest.raises(ConfigError, match="no address"):
        LookupBuffer.connect()


def test_a_buffer_is_served_once_and_only_where_it_is():
    with LookupBuffer() as server:
        with pytest.raises(ConfigError, match="needs a token"):
            server.serve("0.0.0.0:0")
        server.serve()
        with pytest.raises(ConfigError, match=f"served at {server.address} already"):
            server.serve()
        with LookupBuffer.connect(server.address) as client, pytest.raises(ConfigError, match="other processes"):
            client.serve()


def test_repr_and_stats_show_the_state():
    with LookupBuffer(10_000) as server:
        assert repr(server) == "<LookupBuffer open, 0 entries, 0 of 10000 bytes, 0 waiting>"
        server.serve()
        insert(server, [1, 2])
        num_bytes = server.stats().num_bytes
        assert 32 + BOOKKEEPING_BYTES < num_bytes < 10_000
        assert server.stats() == LookupBufferStats(1, 0, 0, 1, 0, num_bytes, 10_000, "")
        with LookupBuffer.connect(server.address) as client:
            assert repr(client) == f"<LookupBuffer client address={server.address} open, 0 waiting>"
            assert select(client, None) == [1, 2]
            assert client.stats() == LookupBufferStats(0, 1, 0, None, None, None, None, client.stats().transport)
            assert client.stats().transport
        eventually(lambda: server.stats() == LookupBufferStats(1, 1, 0, 0, 0, 0, 10_000, ""))


def test_one_process_needs_no_ucx(monkeypatch):
    monkeypatch.setenv("KVPIPE_UCX_LIB", "/nonexistent")
    with LookupBuffer() as buffer:
        insert(buffer, [1])
        assert select(buffer, [1]) == [1]
