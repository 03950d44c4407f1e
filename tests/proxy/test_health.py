"""The state of an instance after failures, probes and answers."""

import pytest

from kvpipe.proxy.health import Health

FROZEN_AFTER_S = 5.0


def frozen():
    health = Health(FROZEN_AFTER_S)
    health.silent(FROZEN_AFTER_S)
    assert health.freeze()
    return health


def test_an_instance_that_has_failed_is_avoided_for_five_seconds():
    health = Health(FROZEN_AFTER_S)
    assert not health.is_avoided(10.0)
    health.failed(10.0)
    assert [health.is_avoided(at_s) for at_s in (10.0, 14.9, 15.0)] == [True, True, False]
    assert health.takes_requests


def test_silence_of_all_ports_freezes():
    health = Health(FROZEN_AFTER_S)
    health.silent(2.0)
    assert (health.left_s, health.freeze()) == (3.0, False)
    health.silent(3.0)
    assert health.freeze()
    assert not health.freeze()  # that is known
    assert (health.is_frozen, health.takes_requests, health.is_doubtful) == (True, False, True)


@pytest.mark.parametrize("is_http", [True, False])
def test_an_answer_of_either_port_ends_the_silence(is_http):
    health = Health(FROZEN_AFTER_S)
    health.silent(4.9)
    health.answered(is_http=is_http)
    health.silent(4.9)
    assert not health.freeze()


def test_slow_http_beside_a_control_port_that_answers_only_lowers_the_preference():
    health = Health(FROZEN_AFTER_S)
    for at_s in range(60):
        health.silent(1.0)
        health.slow()
        health.answered(is_http=False)
        assert not health.freeze()
        assert (health.takes_requests, health.is_avoided(at_s), health.is_doubtful) == (True, True, True)
    health.answered(is_http=True)
    assert (health.is_avoided(60), health.is_doubtful) == (False, False)


def test_a_control_port_does_not_thaw_and_http_opens_by_half():
    health = frozen()
    health.answered(is_http=False)
    assert health.is_frozen
    health.answered(is_http=True)
    assert (health.is_frozen, health.takes_requests) == (False, True)


@pytest.mark.parametrize(
    ("end", "takes_next"), [("served", True), ("failed", True), ("trial_left", True), (None, False)]
)
def test_a_half_open_instance_gets_one_request_until_that_has_ended(end, takes_next):
    health = frozen()
    health.answered(is_http=True)
    health.asked()
    assert not health.takes_requests
    if end is not None:
        getattr(health, end)(*([7.0] if end == "failed" else []))
    assert health.takes_requests == takes_next
    health.asked()
    assert health.takes_requests == (end in ("served", "failed"))  # else the next one is a trial again


def test_a_trial_that_freezes_is_over():
    health = frozen()
    health.answered(is_http=True)
    health.asked()
    health.silent(FROZEN_AFTER_S)
    assert health.freeze()
    health.trial_left()
    assert health.is_frozen


def test_an_answer_to_a_request_is_a_sign_of_life():
    health = Health(FROZEN_AFTER_S)
    health.silent(4.9)
    health.served()
    health.silent(4.9)
    assert not health.freeze()
