from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.request_record import RequestRecord
from kvpipe.proxy.results import RecentHandoffs


def test_only_the_latest_handoffs_are_remembered():
    recent = RecentHandoffs(capacity=2)
    for handoff in ("a", "b", "c"):
        recent.remember(handoff, "", "p:1", record=RequestRecord("/", Metrics()), timing=None)
    assert recent.get("a") is None
    assert recent.get("c").addresses == ("p:1",)
