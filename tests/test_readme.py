"""The Python of README.md, run as it stands: both ends in this process, nothing added but tensors and addresses."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest

import kvpipe
from tests.peers import pattern, wait_until

pytestmark = pytest.mark.ucx

README = (Path(__file__).parents[1] / "README.md").read_text()
SECTIONS = {text.partition("\n")[0]: text for text in README.split("\n## ")[1:]}
BLOCK_BYTES, NUM_BLOCKS = 65536, 64


def examples(section):
    """The Python blocks of a section, cut where there is an empty line: each part belongs to one process."""
    blocks = re.findall(r"^```python\n(.*?)^```", SECTIONS[section], re.DOTALL | re.MULTILINE)
    return [block.split("\n\n") for block in blocks]


def test_these_are_all_of_its_examples():
    assert {name: len(examples(name)) for name in SECTIONS if examples(name)} == {
        "Pipe": 1,
        "LookupBuffer": 1,
        "Agent": 1,
    }


def test_a_pipe_moves_a_tensor_to_another_process():
    [[imported, here, elsewhere]] = examples("Pipe")
    sent, names = np.arange(12).reshape(3, 4), {}
    exec(imported, names)
    receiver = threading.Thread(target=exec, args=(here, names))
    receiver.start()
    wait_until(lambda: "pipe" in names)
    exec(elsewhere, {"kvpipe": kvpipe, "address": names["pipe"].address, "tensor": sent})
    receiver.join()
    with names["pipe"]:
        assert np.array_equal(names["tensor"], sent)


def test_a_lookup_buffer_delivers_an_entry_by_its_tokens():
    [[here, elsewhere]] = examples("LookupBuffer")
    tokens = np.arange(10)
    names = {"kvpipe": kvpipe, "input_tokens": tokens, "roi": None, "key": tokens + 1, "value": None, "hidden": None}
    exec(here, names)
    with names["buffer"] as served:
        names = {"kvpipe": kvpipe, "address": served.address, "prompt": tokens[:4]}
        exec(elsewhere, names)
        assert [names[name].tolist() for name in ("input_tokens", "key")] == [tokens.tolist(), (tokens + 1).tolist()]


def test_an_agent_reads_and_writes_blocks_of_a_peer_and_notifies_it():
    [[both, here, elsewhere]] = examples("Agent")
    mine, theirs = ({"kvpipe": kvpipe, "memory": pattern(NUM_BLOCKS, BLOCK_BYTES) + salt} for salt in (0, 1 << 24))
    for names in (mine, theirs):
        exec(both, names)
    with mine["agent"], theirs["agent"]:
        before = [names["memory"].copy() for names in (mine, theirs)]
        mine["address"] = theirs["agent"].address
        exec(here, mine)
        exec(elsewhere, theirs)
        assert theirs["tag"] == b"request 5"
        assert np.array_equal(mine["memory"][:3], before[1][7:10])
        assert np.array_equal(theirs["memory"][10:13], before[0][3:6])
        assert mine["plan"].read().wait(20) == NUM_BLOCKS * BLOCK_BYTES
        assert np.array_equal(mine["memory"], theirs["memory"])
