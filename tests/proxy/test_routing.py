from collections import Counter

import pytest

from kvpipe.proxy.instances import Instance
from kvpipe.proxy.routing import RoundRobin, goes_to_decode_alone

A, B, C = (Instance(f"http://{name}:1") for name in "abc")

ALONE = [
    {"prompt": ["a", "b"]},
    {"prompt": [[1], [2]]},
    {"prompt": "a", "n": 2},
    {"prompt": "a", "n": "2"},
    {"prompt": "a", "best_of": 2},
    {"prompt": "a", "use_beam_search": True},
    {"prompt": "a", "echo": True},
    {"prompt": "a", "prompt_logprobs": 0},
    {"prompt": "a", "prompt_embeds": "AAAA"},
]
HANDED_OFF = [
    {"prompt": "a"},
    {"prompt": ["a"]},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1, 2, 3]]},
    {"prompt": []},
    {"messages": [{"role": "user", "content": "a"}]},
    {"prompt": "a", "n": 1, "best_of": 1, "echo": False, "prompt_logprobs": None},
    {"prompt": "a", "n": None, "use_beam_search": False, "logprobs": 5},
]


def well(_):
    return False


def test_round_robin_starts_one_further_each_time_and_offers_all():
    pool = RoundRobin()
    assert [pool.order([A, B, C], well) for _ in range(4)] == [[A, B, C], [B, C, A], [C, A, B], [A, B, C]]


@pytest.mark.parametrize("num_prefill", range(1, 5))
@pytest.mark.parametrize("num_decode", range(1, 5))
def test_two_pools_in_turn_use_every_pair_alike(num_prefill, num_decode):
    of_prefill = [Instance(f"http://p{index}:1") for index in range(num_prefill)]
    of_decode = [Instance(f"http://d{index}:1") for index in range(num_decode)]
    prefill, decode = RoundRobin(), RoundRobin(of_prefill.__len__)
    num_pairs = num_prefill * num_decode
    pairs = Counter(
        (prefill.order(of_prefill, well)[0], decode.order(of_decode, well)[0]) for _ in range(3 * num_pairs)
    )
    assert len(pairs) == num_pairs
    assert set(pairs.values()) == {3}


def test_instances_that_are_avoided_are_asked_last():
    pool = RoundRobin()
    assert [pool.order([A, B, C], A.__eq__) for _ in range(3)] == [[B, C, A], [B, C, A], [C, B, A]]
    assert pool.order([A, B, C], lambda _: True) == [A, B, C]


def test_other_servers_are_asked_before_the_other_ranks_of_a_server():
    ranks = [Instance(server.url, f"{server.url}:7", rank) for server in (A, B) for rank in range(2)]
    pool = RoundRobin()
    found = [[instance.name[7:] for instance in pool.order(ranks, well)] for _ in range(3)]
    assert found[:2] == [["a:1#dp0", "b:1#dp0", "b:1#dp1", "a:1#dp1"], ["a:1#dp1", "b:1#dp0", "b:1#dp1", "a:1#dp0"]]
    assert found[2] == ["b:1#dp0", "a:1#dp0", "a:1#dp1", "b:1#dp1"]
    assert pool.order(ranks, lambda instance: instance.url == B.url)[0].url == A.url


@pytest.mark.parametrize("body", ALONE)
def test_requests_that_are_no_single_sequence_go_to_decode_alone(body):
    assert goes_to_decode_alone(body)


@pytest.mark.parametrize("body", HANDED_OFF)
def test_requests_of_one_sequence_are_handed_off(body):
    assert not goes_to_decode_alone(body)
