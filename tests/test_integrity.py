"""The argument `integrity` of agents, pipes and lookup buffers."""

import numpy as np
import pytest

from kvpipe import Agent, ConfigError, LookupBuffer, Pipe


@pytest.fixture
def receiver():
    with Pipe.listen() as receiver:
        yield receiver


@pytest.mark.parametrize("integrity", ["auto", "checksum", "validate", "none"])
def test_a_pipe_moves_tensors_with_every_integrity(receiver, integrity):
    large, small = np.arange(1 << 20, dtype=np.uint32), np.arange(8)
    with Pipe.connect(receiver.address, integrity=integrity) as sender:
        works = [sender.isend_tensor(tensor) for tensor in (large, small, large)]
        for expected in (large, small, large):
            assert np.array_equal(receiver.recv_tensor(timeout=10), expected)
        for work in works:
            work.wait(10)


def test_blocks_and_entries_are_not_validated_and_the_error_says_why():
    with pytest.raises(ConfigError, match="no grant that its source could confirm"):
        Agent(integrity="validate")
    with pytest.raises(ConfigError, match="asked in any case whether it is still leased"):
        LookupBuffer().serve(integrity="validate")
    with pytest.raises(ConfigError, match="still leased"):
        LookupBuffer.connect("127.0.0.1:1", integrity="validate")


def test_an_unknown_integrity_is_refused_with_those_that_exist(receiver):
    with pytest.raises(ConfigError, match="auto, checksum, validate, none"):
        Pipe.connect(receiver.address, integrity="crc")
    with pytest.raises(ConfigError, match="auto, checksum, none"):
        Agent(integrity="crc")


def test_checksum_still_works_and_warns_with_the_line_to_write(receiver):
    with pytest.warns(DeprecationWarning, match='write integrity="none"'):
        sender = Pipe.connect(receiver.address, checksum=False)
    with sender:
        sender.isend_tensor(np.arange(8))
        assert np.array_equal(receiver.recv_tensor(timeout=10), np.arange(8))
    with pytest.warns(DeprecationWarning, match='write integrity="auto"'):
        Agent(checksum=True).close()
    buffer = LookupBuffer()
    with pytest.warns(DeprecationWarning, match='write integrity="none"'):
        buffer.serve(checksum=False)
    with pytest.warns(DeprecationWarning, match='write integrity="none"'):
        LookupBuffer.connect(buffer.address, checksum=False).close()
    buffer.close()


def test_integrity_and_checksum_together_are_refused(receiver):
    with pytest.raises(ConfigError, match="write only integrity"):
        Pipe.connect(receiver.address, integrity="auto", checksum=True)
    with pytest.raises(ConfigError, match="write only integrity"):
        Agent(integrity="none", checksum=False)
