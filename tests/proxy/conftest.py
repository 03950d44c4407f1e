import pytest

from .harness import LIMIT_S


@pytest.fixture(autouse=True)
def _descriptions_are_there_from_the_start(monkeypatch):
    """The proxy waits a second for them when it starts, which is short on a busy machine."""
    monkeypatch.setattr("kvpipe.proxy.descriptions._START_S", LIMIT_S)
    monkeypatch.setattr("kvpipe.proxy.ranks._START_S", LIMIT_S)
