import pytest

from . import harness
from .harness import LIMIT_S


@pytest.fixture(autouse=True)
def _descriptions_are_there_from_the_start(monkeypatch):
    """The proxy waits a second for them when it starts, which is short on a busy machine."""
    monkeypatch.setattr("kvpipe.proxy.descriptions._START_S", LIMIT_S)
    monkeypatch.setattr("kvpipe.proxy.ranks._START_S", LIMIT_S)


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    from .certificates import Authority  # noqa: PLC0415 - its package is needed by these tests alone

    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def certificate(authority):
    return authority.issue()


@pytest.fixture(params=["http", "https"])
def _each_scheme(request, monkeypatch):
    """The test runs a second time with TLS between client and proxy, and between proxy and instances."""
    if request.param == "https":
        monkeypatch.setattr(harness, "CERTIFICATE", request.getfixturevalue("certificate"))
