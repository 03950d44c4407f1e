"""The speed of prefill steps, and the end that follows from it."""

import random

import pytest

from kvpipe.vllm.prefill_clock import PrefillClock


def steps(clock, *steps, at=0.0):
    """Steps one after the other, as (tokens, seconds); the time when the last one has ended."""
    for num_tokens, elapsed_s in steps:
        clock.scheduled(num_tokens, at)
        at += elapsed_s
        clock.ended(at)
    return at


def test_nothing_is_predicted_before_a_step_has_been_measured():
    clock = PrefillClock()
    clock.scheduled(256, 0.0)
    assert clock.remaining_s(600, 256, 0.0) is None


def test_nothing_is_predicted_between_steps():
    clock = PrefillClock()
    now_s = steps(clock, (100, 1.0))
    assert clock.remaining_s(10, 10, now_s) is None


def test_what_remains_is_the_tokens_by_the_speed():
    clock = PrefillClock()
    now_s = steps(clock, (256, 0.5))
    clock.scheduled(256, now_s)
    assert clock.remaining_s(1024, 256, now_s) == pytest.approx(2.0)


def test_a_request_that_shares_its_steps_takes_as_much_longer():
    clock = PrefillClock()
    now_s = steps(clock, (256, 0.5))
    clock.scheduled(256, now_s)
    assert clock.remaining_s(512, 128, now_s) == pytest.approx(2.0)


def test_the_estimate_is_corrected_at_every_step():
    clock = PrefillClock()
    now_s, speeds = steps(clock, (100, 1.0)), []
    for _ in range(20):
        now_s = steps(clock, (100, 0.6), at=now_s)
        speeds.append(clock.tokens_per_s)
    assert speeds == sorted(speeds)
    assert speeds[-1] == pytest.approx(100 / 0.6, rel=0.01)


def test_with_asynchronous_scheduling_a_step_begins_when_the_one_before_has_ended():
    clock = PrefillClock()
    clock.scheduled(100, 0.0)
    clock.scheduled(100, 0.01)
    clock.ended(1.0)
    assert clock.tokens_per_s == pytest.approx(100)
    clock.scheduled(100, 1.01)
    # The second has 0.99 s left, the third begins then.
    assert clock.remaining_s(100, 100, 1.01) == pytest.approx(1.99)
    clock.ended(2.0)
    assert clock.tokens_per_s == pytest.approx(100)


def test_decode_steps_and_steps_without_time_are_not_measured():
    clock = PrefillClock()
    now_s = steps(clock, (1, 0.5), (0, 0.5), (100, 0.0))
    assert clock.tokens_per_s is None
    clock.ended(now_s + 1)
    assert clock.tokens_per_s is None


def test_a_step_that_seems_far_too_fast_counts_as_twice_as_fast():
    clock = PrefillClock()
    steps(clock, (100, 1.0), (100, 0.001))
    assert clock.tokens_per_s == pytest.approx(180 / 1.3)


def test_an_engine_that_reports_no_ends_predicts_nothing():
    clock = PrefillClock()
    for number in range(1000):
        clock.scheduled(256, float(number))
    assert clock.remaining_s(256, 256, 1000.0) is None


@pytest.mark.parametrize("seed", range(50))
def test_at_a_steady_speed_the_prediction_is_the_end(seed):
    rng = random.Random(seed)
    speed, budget = rng.uniform(10, 1e5), rng.randint(2, 4096)
    clock, now_s = PrefillClock(), rng.uniform(0, 1e6)
    for _ in range(rng.randint(1, 20)):
        num_tokens = rng.randint(2, budget)
        now_s = steps(clock, (num_tokens, num_tokens / speed), at=now_s)
    num_left = rng.randint(1, 20_000)
    ends_at_s = now_s + num_left / speed
    while num_left > 0:
        num_new = min(budget, num_left)
        clock.scheduled(num_new, now_s)
        assert now_s + clock.remaining_s(num_left, num_new, now_s) == pytest.approx(ends_at_s, rel=1e-4)
        now_s += num_new / speed
        clock.ended(now_s)
        num_left -= num_new


@pytest.mark.parametrize("seed", range(50))
def test_after_any_input_the_speed_and_the_prediction_are_sane(seed):
    rng, clock, now_s = random.Random(seed), PrefillClock(), 0.0
    for _ in range(200):
        now_s += rng.choice([0.0, 1e-9, 0.01, 3.0])
        if rng.random() < 0.5:
            clock.scheduled(rng.choice([0, 1, 2, 500]), now_s)
        else:
            clock.ended(now_s)
        remaining_s = clock.remaining_s(rng.randint(1, 9000), 1, now_s)
        assert remaining_s is None or 0 <= remaining_s < float("inf")
        assert clock.tokens_per_s is None or clock.tokens_per_s > 0


def test_a_prefill_that_ends_with_its_step_takes_nothing_beyond_it():
    assert PrefillClock().beyond_s(100, 256) == 0.0


def test_beyond_a_step_a_prefill_takes_the_tokens_left_by_the_speed():
    clock = PrefillClock()
    assert clock.beyond_s(600, 256) is None
    now_s = steps(clock, (256, 0.5))
    clock.scheduled(256, now_s)
    assert clock.beyond_s(512, 256) == pytest.approx(0.5)
    assert clock.beyond_s(512, 128) == pytest.approx(1.5)
