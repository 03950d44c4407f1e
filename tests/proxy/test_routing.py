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
    pool = RoundRobin([A, B, C])
    assert [pool.order(well) for _ in range(4)] == [[A, B, C], [B, C, A], [C, A, B], [A, B, C]]


@pytest.mark.parametrize("num_prefill", range(1, 5))
@pytest.mark.parametrize("num_decode", range(1, 5))
def test_two_pools_in_turn_use_every_pair_alike(num_prefill, num_decode):
    prefill = RoundRobin([Instance(f"http://p{index}:1") for index in range(num_prefill)])
    decode = RoundRobin([Instance(f"http://d{index}:1") for index in range(num_decode)], num_prefill)
    num_pairs = num_prefill * num_decode
    pairs = Counter((prefill.order(well)[0], decode.order(well)[0]) for _ in range(3 * num_pairs))
    assert len(pairs) == num_pairs
    assert set(pairs.values()) == {3}


def test_instances_that_are_avoided_are_asked_last():
    pool = RoundRobin([A, B, C])
    assert [pool.order(A.__eq__) for _ in range(3)] == [[B, C, A], [B, C, A], [C, B, A]]
    assert pool.order(lambda _: True) == [A, B, C]


@pytest.mark.parametrize("body", ALONE)
def test_requests_that_are_no_single_sequence_go_to_decode_alone(body):
    assert goes_to_decode_alone(body)


@pytest.mark.parametrize("body", HANDED_OFF)
def test_requests_of_one_sequence_are_handed_off(body):
    assert not goes_to_decode_alone(body)
