from kvpipe.proxy.results import RecentHandoffs


def test_only_the_latest_handoffs_are_remembered_and_others_mean_everyone():
    recent = RecentHandoffs(("d:1", "p:1", "p:2"), capacity=2)
    for handoff in ("a", "b", "c"):
        recent.remember(handoff, "", "p:1")
    assert recent.addresses("a") == ("d:1", "p:1", "p:2")
    assert recent.addresses("c") == ("p:1",)
