"""Decisions to load or compute, and to pause the store: pure rules, with the time as an argument."""

import pytest

from kvpipe.vllm.store.break_even import PROBE_INTERVAL_S, SHORTEST_LIMIT_S, BreakEven, LoadClock, Reason
from kvpipe.vllm.store.circuit_breaker import FIRST_OPEN_S, LONGEST_OPEN_S, NUM_FAILURES, Breaker

TIMEOUT_S = 10.0
TOKENS = 1000
SPEED = 1000.0  # of prefill: a second for TOKENS


def measured(chunk_s: float, fixed_s: float = 0.0) -> BreakEven:
    """After loads of several sizes, at most of 4 chunks."""
    break_even = BreakEven(is_always=False, timeout_s=TIMEOUT_S)
    for num_chunks in (1, 4, 2, 3):
        break_even.loaded(num_chunks, fixed_s + num_chunks * chunk_s)
    return break_even


def test_a_load_that_is_faster_than_prefill_is_made_and_ends_when_prefill_would():
    decision = measured(0.1).decide(TOKENS, 4, SPEED, 0.0)
    assert (decision.is_load, decision.reason) == (True, Reason.FASTER)
    assert decision.limit_s == pytest.approx(1.0)


def test_a_slow_store_is_not_used():
    break_even = measured(0.5)
    assert break_even.decide(TOKENS, 4, SPEED, 0.0).reason == Reason.PROBE
    assert not break_even.decide(TOKENS, 4, SPEED, 1.0).is_load


def test_a_slow_store_is_probed_from_time_to_time_and_used_when_it_has_recovered():
    break_even = measured(0.5)
    break_even.decide(TOKENS, 4, SPEED, 0.0)
    assert not break_even.decide(TOKENS, 4, SPEED, PROBE_INTERVAL_S - 1).is_load
    assert break_even.decide(TOKENS, 4, SPEED, PROBE_INTERVAL_S).reason == Reason.PROBE
    for _ in range(12):
        break_even.loaded(4, 0.1)
    assert break_even.decide(TOKENS, 4, SPEED, PROBE_INTERVAL_S + 1).reason == Reason.FASTER


def test_without_measurements_a_load_is_made():
    break_even = BreakEven(is_always=False, timeout_s=TIMEOUT_S)
    assert break_even.decide(TOKENS, 4, None, 0.0).limit_s == TIMEOUT_S
    decision = break_even.decide(TOKENS, 4, SPEED, 0.0)
    assert (decision.reason, decision.limit_s) == (Reason.UNMEASURED, pytest.approx(1.0))


def test_the_limit_of_a_short_load_outlasts_a_pause_and_that_of_a_long_one_is_the_setting():
    assert measured(0.001).decide(10, 1, SPEED, 0.0).limit_s == SHORTEST_LIMIT_S
    assert measured(0.001).decide(100_000, 4, SPEED, 0.0).limit_s == TIMEOUT_S


def test_a_load_that_is_always_made_asks_for_no_measurement():
    break_even = BreakEven(is_always=True, timeout_s=TIMEOUT_S)
    break_even.loaded(1, 1000.0)
    assert break_even.decide(1, 1, SPEED, 0.0).reason == Reason.ALWAYS


@pytest.mark.parametrize(("fixed_s", "chunk_s"), [(0.0, 0.1), (0.5, 0.01), (0.02, 0.02)])
def test_the_time_of_a_load_and_of_its_chunks_are_told_apart(fixed_s: float, chunk_s: float):
    clock = LoadClock()
    for num_chunks in (1, 8, 3, 16, 2):
        clock.loaded(num_chunks, fixed_s + num_chunks * chunk_s)
    assert clock.predict_s(10) == pytest.approx(fixed_s + 10 * chunk_s)


def test_loads_of_one_size_predict_others_in_proportion():
    clock = LoadClock()
    assert clock.predict_s(1) is None
    clock.loaded(4, 0.4)
    clock.loaded(4, 0.4)
    assert clock.predict_s(8) == pytest.approx(0.8)


def test_a_load_that_brought_nothing_counts_as_a_slow_one():
    clock = LoadClock()
    clock.loaded(0, 1.0)
    assert clock.predict_s(3) == pytest.approx(3.0)


def test_a_prediction_is_never_negative():
    clock = LoadClock()
    for num_chunks, elapsed_s in ((1, 5.0), (9, 0.1), (2, 4.0)):
        clock.loaded(num_chunks, elapsed_s)
    assert all(clock.predict_s(num_chunks) >= 0 for num_chunks in (1, 5, 50))


def test_a_breaker_opens_after_failures_in_a_row():
    breaker = Breaker()
    for _ in range(NUM_FAILURES - 1):
        breaker.failed(0.0)
    breaker.succeeded()
    for _ in range(NUM_FAILURES):
        assert breaker.allows(1.0)
        breaker.failed(1.0)
    assert breaker.state == "open"
    assert not breaker.allows(1.0)


def test_an_open_breaker_allows_one_probe_at_a_time_and_closes_when_it_succeeds():
    breaker = opened(0.0)
    assert breaker.allows(FIRST_OPEN_S)
    assert breaker.state == "half-open"
    assert not breaker.allows(FIRST_OPEN_S)
    breaker.succeeded()
    assert breaker.state == "closed"
    assert breaker.allows(FIRST_OPEN_S)


def test_each_failed_probe_doubles_the_time_until_the_next_up_to_a_bound():
    breaker, now_s, waits = opened(0.0), 0.0, []
    for _ in range(8):
        began_s = now_s
        while not breaker.allows(now_s):
            now_s += 0.5
        waits.append(now_s - began_s)
        breaker.failed(now_s)
    assert waits[:3] == [FIRST_OPEN_S, 2 * FIRST_OPEN_S, 4 * FIRST_OPEN_S]
    assert waits[-1] == LONGEST_OPEN_S


def test_a_probe_whose_result_never_comes_is_followed_by_another():
    breaker = opened(0.0)
    assert breaker.allows(FIRST_OPEN_S)
    assert breaker.allows(2 * FIRST_OPEN_S)


def opened(now_s: float) -> Breaker:
    breaker = Breaker()
    for _ in range(NUM_FAILURES):
        breaker.failed(now_s)
    return breaker
