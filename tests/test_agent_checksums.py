"""Agent: blocks that change while they are moved."""

import contextlib
import threading

import numpy as np
import pytest

from kvpipe import Agent, CorruptDataError
from tests.peers import pattern, wait_until

NUM_BLOCKS, BLOCK_BYTES = 512, 16384
ALL = range(NUM_BLOCKS)


@contextlib.contextmanager
def changing(memory):
    """Another thread changes the memory all the time."""
    is_over = threading.Event()

    def change():
        while not is_over.is_set():
            memory[:] += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


@pytest.fixture
def memory():
    return pattern(NUM_BLOCKS, BLOCK_BYTES)


@pytest.fixture
def blocks():
    return np.zeros((NUM_BLOCKS, BLOCK_BYTES // 4), np.uint32)


@pytest.fixture
def source(other, memory):
    """The address of an agent whose region `kv` is the memory."""
    other.register(memory, "kv", BLOCK_BYTES, writable=True)
    return other.address


def is_found_out(move):
    try:
        move().wait(20)
    except CorruptDataError as error:
        return "differs from its checksum" in str(error)
    return False


def test_blocks_that_change_while_they_are_read_end_the_read_and_the_peer_stays_usable(agent, source, memory, blocks):
    region, peer = agent.register(blocks, "own", BLOCK_BYTES), agent.connect(source)
    with changing(memory):
        wait_until(lambda: is_found_out(lambda: peer.read_blocks(region, ALL, "kv", ALL)))
    assert peer.read_blocks(region, ALL, "kv", ALL).wait(20) == memory.nbytes
    assert np.array_equal(blocks, memory)


def test_blocks_that_change_while_they_are_written_end_the_write_and_no_tag_comes(agent, other, source, memory, blocks):
    region, peer = agent.register(blocks, "own", BLOCK_BYTES), agent.connect(source)
    with changing(blocks):
        wait_until(lambda: is_found_out(lambda: peer.write_blocks(region, ALL, "kv", ALL)))
    assert peer.write_blocks(region, ALL, "kv", ALL, notify=b"whole").wait(20) == memory.nbytes
    assert [tag for _, tag in other.notifications(20)] == [b"whole"]
    assert np.array_equal(blocks, memory)


def test_without_checksums_what_is_read_is_what_was_there(source, memory, blocks):
    with Agent(integrity="none") as reader:
        region, peer = reader.register(blocks, "own", BLOCK_BYTES), reader.connect(source)
        with changing(memory):
            for _ in range(20):
                assert peer.read_blocks(region, ALL, "kv", ALL).wait(20) == memory.nbytes
