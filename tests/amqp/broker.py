"""A real RabbitMQ broker as tests use it, and what may happen to one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from bench.instances.broker_process import BrokerProcess, missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_MEMORY = "vm_memory_monitor:set_vm_memory_high_watermark({})"
_DISK = "rabbit_disk_monitor:set_disk_free_limit({})"
_TICK_MS = 200
# Settings that set off each alarm, and those that end it: the broker's own defaults.
_ALARMS = {
    "memory": (_MEMORY.format("{absolute, 1}"), _MEMORY.format("0.4")),
    "disk": (_DISK.format("1 bsl 60"), _DISK.format("50000000")),
}


class FaultyBroker(BrokerProcess):
    """A broker to which things happen. A call takes as long as `erl_call`, which is milliseconds."""

    def block_publishers(self, resource: str = "memory") -> None:
        """Has it run out of memory or disk: it reads no more from connections that publish, and tells them so.

        Every connection has been told when this returns: the alarms are listed by the process that tells them.
        """
        self.call(f"{_ALARMS[resource][0]}, [_ | _] = rabbit_alarm:get_alarms()")

    def unblock(self, resource: str = "memory") -> None:
        """Gives it what it has run out of."""
        self.call(_ALARMS[resource][1])

    @contextlib.contextmanager
    def blocked(self, resource: str = "memory") -> Iterator[None]:
        """Has publishers blocked inside the block."""
        self.block_publishers(resource)
        try:
            yield
        finally:
            self.unblock(resource)

    @contextlib.contextmanager
    def limited(self, num_bytes: int) -> Iterator[None]:
        """Has it close channels, of those that are opened inside the block, with a larger message."""
        limit = "application:{}(rabbit, max_message_size{})"
        before = self.call(limit.format("get_env", "")).removeprefix("{ok,").removesuffix("}")
        self.call(limit.format("set_env", f", {num_bytes}"))
        try:
            yield
        finally:
            self.call(limit.format("set_env", f", {before}"))

    def time_out_deliveries(self, after_s: float) -> None:
        """Has it close channels with a delivery that is not acknowledged in this time.

        By default it looks once a minute, and closes them after 30 minutes. It holds for channels opened from now on.
        """
        values = {"consumer_timeout": round(1000 * after_s), "channel_tick_interval": _TICK_MS}
        self.call(", ".join(f"application:set_env(rabbit, {name}, {value})" for name, value in values.items()))

    def save_directory(self) -> None:
        """Has it write which quorum queues it has. It does so every 500 ms; a younger queue does not survive a kill."""
        self.call("[ok = dets:sync(Table) || Table <- dets:all()]")

    def close_connections(self) -> None:
        """Closes the connections of all clients, as an operator may."""
        self.call('rabbit_networking:close_connections(rabbit_networking:connections(), "by the operator")')


def started(folder: Path) -> FaultyBroker:
    """A broker with its data in a folder; the test is skipped where none is installed."""
    if reason := missing():
        pytest.skip(reason)
    return FaultyBroker(folder)
