"""Fixtures of the tests with a RabbitMQ broker."""

from __future__ import annotations

import pytest

from tests.amqp.broker import started


@pytest.fixture(scope="session")
def broker(tmp_path_factory):
    """A broker for all tests that leave it as it was; its queues are shared, so that each test names its own."""
    with started(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture
def own_broker(tmp_path):
    """A broker that this test may end or restart."""
    folder = tmp_path / "broker"
    folder.mkdir()
    with started(folder) as broker:
        yield broker
