"""Fixtures of the tests with Redis and Valkey servers: each test runs with both, with Valkey among the slow ones."""

from __future__ import annotations

import functools

import pytest

from tests.store import valkey_servers
from tests.store.valkey_servers import PROGRAMS


def _params():
    if not PROGRAMS:
        reason = "neither redis-server nor valkey-server was found: scripts/servers"
        return [pytest.param(None, id="no server", marks=pytest.mark.skip(reason=reason))]
    first, *others = PROGRAMS
    return [first, *(pytest.param(name, marks=pytest.mark.slow) for name in others)]


@pytest.fixture(scope="module", params=_params())
def program(request):
    return PROGRAMS[request.param]


@pytest.fixture(scope="module")
def running(program):
    return functools.partial(valkey_servers.running, program)


@pytest.fixture(scope="module")
def running_cluster(program):
    return functools.partial(valkey_servers.running_cluster, program)


@pytest.fixture(scope="module")
def server(running, tmp_path_factory):
    with running(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return valkey_servers.certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(params=["plain", "tls"])
def tls_or_none(request):
    """Runs a test without TLS and with it."""
    return request.getfixturevalue("tls") if request.param == "tls" else None
