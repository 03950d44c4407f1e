"""The next instance of a request: a table of routes and failures, without a proxy."""

import pytest
from multidict import CIMultiDict

from kvpipe.proxy.instances import Instance
from kvpipe.proxy.steps import RetryBudget, RoutedRequest, Step
from kvpipe.proxy.upstream import Answer, InstanceError

P1, P2, P3, D1, D2, D3 = (Instance(f"http://{name}:1") for name in ("p1", "p2", "p3", "d1", "d2", "d3"))
BOTH = {"prefill": (P1, P2, P3), "decode": (D1, D2, D3)}
FINAL = Step("final")


def failure(instance, kind):
    """The failure of an instance; `500` and `503` are answers."""
    role = "prefill" if instance in BOTH["prefill"] else "decode"
    if isinstance(kind, int):
        return InstanceError(role, instance, "no", "answered", Answer(role, instance, kind, CIMultiDict(), b""))
    return InstanceError(role, instance, "no", kind)


def steps(route, *failures, prefill=BOTH["prefill"], decode=BOTH["decode"], budget=None, shown="", **options):
    """The steps of one request, with `shown` before its first failure."""
    request = RoutedRequest(route, prefill, decode, budget or RetryBudget(), **options)
    taken = [request.first()]
    if shown:
        getattr(request, f"{shown}_shown")()
    return [*taken, *(request.failed(failure(*each)) for each in failures)]


SPLIT = Step("split", P1, D1)
ALONE_P, ALONE_D = Step("alone", prefill=P1), Step("alone", decode=D1)
FALLBACK = Step("alone", decode=D1, is_fallback=True)
TABLE = [
    # Before the client has anything.
    ("handoff", [(P1, "unreached")], [SPLIT, Step("split", P2, D1)]),
    ("handoff", [(P1, 503)], [SPLIT, Step("split", P2, D1)]),
    ("handoff", [(P1, 503), (P2, 503)], [SPLIT, Step("split", P2, D1), FALLBACK]),
    ("handoff", [(P1, "unreached"), (P2, "unreached"), (P3, "unreached")], [SPLIT, *2 * [...], FALLBACK]),
    ("handoff", [(P1, "timeout")], [SPLIT, Step("final", denial="timeout")]),
    ("handoff", [(P1, "broken"), (P2, 500)], [SPLIT, Step("split", P2, D1), FINAL]),
    ("handoff", [(P1, 503), (P2, "broken"), (D1, "broken")], [SPLIT, ..., FALLBACK, Step("final", denial="limit")]),
    ("handoff", [(D1, "unreached"), (D2, "unreached")], [SPLIT, Step("same", decode=D2), Step("same", decode=D3)]),
    ("handoff", [(D1, 503)], [SPLIT, Step("split", P1, D2)]),
    ("handoff", [(D1, 503), (D2, 503)], [SPLIT, Step("split", P1, D2), FINAL]),
    ("handoff", [(D1, "timeout")], [SPLIT, Step("final", denial="timeout")]),
    ("handoff", [(P1, "broken"), (D1, "broken")], [SPLIT, Step("split", P2, D1), Step("final", denial="limit")]),
    ("store", [(P1, 503)], [SPLIT, Step("split", P2, D1)]),
    ("store", [(D1, "unreached"), (D2, 503)], [SPLIT, Step("same", decode=D2), Step("same", decode=D3)]),
    ("prefill", [(P1, 503)], [ALONE_P, Step("alone", prefill=P2)]),
    ("prefill", [(P1, 503), (P2, 503)], [ALONE_P, Step("alone", prefill=P2), FALLBACK]),
    ("decode", [(D1, 503)], [ALONE_D, Step("alone", decode=D2)]),
    ("decode", [(D1, "given_up")], [ALONE_D, Step("final", denial="timeout")]),
]


def like(expected, found):
    return len(expected) == len(found) and all(a in (..., b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(("route", "failures", "expected"), TABLE)
def test_each_failure_has_its_next_step(route, failures, expected):
    found = steps(route, *failures)
    assert like(expected, found), found


def test_without_fallback_the_last_failure_of_prefill_is_the_answer():
    for route in ("handoff", "store", "prefill"):
        assert steps(route, (P1, 503), prefill=(P1,), falls_back=False)[-1] == FINAL


def test_without_a_decode_left_prefill_is_not_asked_again():
    assert steps("handoff", (D1, "unreached"), (P1, 503), decode=(D1,))[1:] == [FINAL, FINAL]


def test_a_used_up_budget_leaves_the_prompt_to_decode_and_asks_no_other_prefill():
    budget = RetryBudget()
    while budget.consume():
        pass
    assert steps("handoff", (P1, 503), budget=budget)[-1] == Step("alone", decode=D1, denial="budget", is_fallback=True)
    assert steps("handoff", (D1, 503), budget=budget)[-1] == Step("final", denial="budget")
    assert steps("handoff", (P1, "unreached"), budget=budget)[-1] == Step("split", P2, D1)


def test_after_a_shown_token_every_other_decode_is_asked_and_the_only_one_once_more():
    failures = [(D1, "contradicted"), (D2, 503), (D3, 503)]
    assert steps("handoff", *failures, shown="token")[1:] == [*(Step("resume", decode=d) for d in (D2, D3)), FINAL]
    lone = steps("store", (D1, 503), (D1, 503), decode=(D1,), shown="token")
    assert lone[1:] == [Step("resume", decode=D1), FINAL]
    assert steps("handoff", (D1, "unreached"), decode=(D1,), shown="token")[-1] == FINAL


def test_after_text_of_decode_no_instance_is_asked():
    assert steps("handoff", (D1, "broken"), shown="text")[-1] == FINAL


def test_a_prefill_that_broke_beside_a_decode_counts_and_only_once():
    request = RoutedRequest("handoff", *BOTH.values(), RetryBudget())
    broken = failure(P1, "broken")
    assert request.failed(failure(D1, "unreached"), broken) == Step("same", decode=D2)
    assert request.failed(failure(D2, "unreached"), broken) == Step("same", decode=D3)
    assert request.failed(failure(D3, "broken"), broken) == FINAL


def test_an_instance_that_takes_nothing_is_left_out():
    def available(*others):
        return {"is_available": lambda _, instance: instance not in others}

    assert steps("handoff", **available(P1, D1)) == [Step("split", P2, D2)]
    assert steps("handoff", **available(P1, P2, P3)) == [FALLBACK]
    assert steps("prefill", **available(P1, P2, P3)) == [FALLBACK]
    assert steps("handoff", **available(P1, P2, P3), falls_back=False) == [FINAL]
    assert steps("decode", **available(D1, D2, D3)) == [FINAL]
    assert steps("handoff", (D1, "unreached"), **available(D2)) == [SPLIT, Step("same", decode=D3)]


def test_a_request_leaves_a_frozen_instance_without_a_retry_of_the_budget():
    budget = RetryBudget()
    while budget.consume():
        pass
    assert steps("handoff", (P1, "frozen"), budget=budget)[-1] == Step("split", P2, D1)
    assert steps("handoff", (P1, "frozen"), prefill=(P1,), budget=budget)[-1] == FALLBACK
    assert steps("handoff", (D1, "frozen"), budget=budget)[-1] == Step("split", P1, D2)
    assert steps("store", (D1, "frozen"), budget=budget)[-1] == Step("same", decode=D2)
    assert steps("store", (D1, "frozen"), budget=budget, shown="token")[-1] == Step("resume", decode=D2)
    assert steps("handoff", (D1, "frozen"), decode=(D1,), shown="token")[-1] == FINAL


@pytest.mark.parametrize(
    ("instance", "options", "may_leave"),
    [
        (P1, {}, True),
        (P1, {"prefill": (P1,)}, True),
        (P1, {"prefill": (P1,), "falls_back": False}, False),
        (P1, {"decode": ()}, False),
        (D1, {}, True),
        (D1, {"decode": (D1,)}, False),
        (D1, {"is_available": lambda _, instance: instance not in (D2, D3)}, False),
    ],
)
def test_a_request_leaves_a_frozen_instance_only_where_another_can_answer(instance, options, may_leave):
    request = RoutedRequest("handoff", **BOTH | {"budget": RetryBudget()} | options)
    role = "prefill" if instance == P1 else "decode"
    assert request.may_leave(role, instance) == may_leave
    request.text_shown()
    assert not request.may_leave(role, instance)


def test_a_quiet_proxy_has_ten_retries_and_every_fifth_request_adds_one():
    budget = RetryBudget()
    assert [budget.consume() for _ in range(11)] == [True] * 10 + [False]
    for _ in range(5):
        assert not budget.consume()
        budget.add_request()
    budget.add_request()
    assert [budget.consume(), budget.consume()] == [True, False]


def test_requests_save_no_more_than_ten_retries():
    budget = RetryBudget()
    for _ in range(1000):
        budget.add_request()
    assert [budget.consume() for _ in range(11)].count(True) == 10


R1, R2 = (Instance("http://r:1", f"r:{7100 + rank}", rank) for rank in range(2))


def test_a_server_that_is_not_reached_is_not_asked_again_by_way_of_another_rank():
    unreached = InstanceError("prefill", R1, "no", "unreached")
    request = RoutedRequest("handoff", (R1, R2, P1), (D1,), RetryBudget())
    assert [request.first(), request.failed(unreached)] == [Step("split", R1, D1), Step("split", P1, D1)]


def test_a_handoff_leaves_a_frozen_server_only_for_another_server():
    frozen = InstanceError("decode", R1, "no", "frozen")
    request = RoutedRequest("handoff", (P1,), (R1, R2), RetryBudget())
    assert not request.may_leave("decode", R1)
    request = RoutedRequest("handoff", (P1,), (R1, R2, D1), RetryBudget())
    assert request.may_leave("decode", R1)
    assert [request.first(), request.failed(frozen)] == [Step("split", P1, R1), Step("split", P1, D1)]


@pytest.mark.parametrize("kind", ["answered", "frozen"])
def test_a_server_whose_rank_vllm_has_chosen_is_not_asked_again_by_way_of_another_rank(kind):
    failed = InstanceError("decode", R1, "no", kind)
    request = RoutedRequest("decode", (), (R1, R2, D1), RetryBudget())
    assert [request.first(), request.failed(failed)] == [Step("alone", decode=R1), Step("alone", decode=D1)]
    request = RoutedRequest("decode", (), (R1, R2), RetryBudget())
    assert not request.may_leave("decode", R1)
    assert [request.first(), request.failed(failed)] == [Step("alone", decode=R1), FINAL]


def test_a_rank_that_has_failed_a_handoff_is_replaced_by_another_one():
    failed = InstanceError("prefill", R1, "no", "answered")
    request = RoutedRequest("handoff", (R1, R2), (D1,), RetryBudget())
    assert request.may_leave("prefill", R1)
    assert [request.first(), request.failed(failed)] == [Step("split", R1, D1), Step("split", R2, D1)]
