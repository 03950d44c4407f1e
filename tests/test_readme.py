"""The Python of README.md and of the Python API's page, run as it stands: both ends in this process, tensors added."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest

import kvpipe
from tests.peers import pattern, wait_until

pytestmark = pytest.mark.ucx

ROOT = Path(__file__).parents[1]
README, API = (ROOT / "README.md").read_text(), (ROOT / "docs/guide/python-api.md").read_text()
BLOCK_BYTES, NUM_BLOCKS = 65536, 64


def sections(page):
    return {text.partition("\n")[0]: text for text in page.split("\n## ")[1:]}


def examples(page, section):
    """The Python blocks of a section, cut where there is an empty line: each part belongs to one process."""
    blocks = re.findall(r"^```python\n(.*?)^```", sections(page)[section], re.DOTALL | re.MULTILINE)
    return [block.split("\n\n") for block in blocks]


@pytest.mark.parametrize(("page", "names"), [(README, ["Python API"]), (API, ["Pipe", "LookupBuffer", "Agent"])])
def test_these_are_all_of_its_examples(page, names):
    numbers = {name: len(examples(page, name)) for name in sections(page)}
    assert {name: number for name, number in numbers.items() if number} == dict.fromkeys(names, 1)


@pytest.mark.parametrize(("page", "section"), [(README, "Python API"), (API, "Pipe")])
def test_a_pipe_moves_a_tensor_to_another_process(page, section):
    [[imported, here, elsewhere]] = examples(page, section)
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
    [[here, elsewhere]] = examples(API, "LookupBuffer")
    tokens = np.arange(10)
    names = {"kvpipe": kvpipe, "input_tokens": tokens, "roi": None, "key": tokens + 1, "value": None, "hidden": None}
    exec(here, names)
    with names["buffer"] as served:
        names = {"kvpipe": kvpipe, "address": served.address, "prompt": tokens[:4]}
        exec(elsewhere, names)
        assert [names[name].tolist() for name in ("input_tokens", "key")] == [tokens.tolist(), (tokens + 1).tolist()]


def test_an_agent_reads_and_writes_blocks_of_a_peer_and_tells_it():
    [[both, here, elsewhere]] = examples(API, "Agent")
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
