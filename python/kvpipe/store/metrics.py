"""Metrics of a store server, in Prometheus' text format."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from kvpipe.exceptions import ClosedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from threading import Thread
    from wsgiref.simple_server import WSGIServer

    from kvpipe.store.base import StoreStats

_GAUGES = {
    "values": ("num_values", "Values, leased ones included."),
    "bytes": ("num_bytes", "Memory of all values and reservations."),
    "capacity_bytes": ("capacity_bytes", "Limit of that memory."),
    "reserved": ("num_reserved", "Reservations under way."),
    "leased": ("num_leased", "Values that a take holds."),
    "waiting": ("num_waiting", "Operations that wait for a value or for space."),
}
_DETAIL_GAUGES = {
    "clients": ("num_clients", "Connected clients."),
    "disk_values": ("num_disk_values", "Values on disk, those in memory too included."),
    "disk_bytes": ("num_disk_bytes", "Bytes of values on disk."),
    "disk_capacity_bytes": ("disk_capacity_bytes", "Limit of those bytes; 0 without a disk."),
}
_DETAIL_COUNTERS = {
    "disk_loads": ("num_loaded", "Values loaded from the disk."),
    "disk_failures": ("num_disk_failures", "Values that could not be written to the disk, or read from it."),
    "over_quota": ("num_over_quota", "Reservations and loads refused because of the quota of their namespace."),
}
_COUNTERS = {
    "committed": ("num_committed", "Values committed."),
    "hits": ("num_hits", "Values that selects and takes got."),
    "misses": ("num_misses", "Selects and takes that got none in time."),
    "evicted": ("num_evicted", "Values deleted to make space."),
    "expired": ("num_expired", "Reservations, leases and values that ended by time."),
    "corrupt": ("num_corrupt", "Values whose bytes a reader found changed."),
    "committed_bytes": ("committed_bytes", "Bytes of the values committed."),
    "hit_bytes": ("hit_bytes", "Bytes of the values that selects and takes got."),
    "waits": ("num_waits", "Operations that had to wait for a value or for space."),
    "fenced": ("num_fenced", "Calls refused because their reservation or lease had ended."),
    "lost": ("num_lost", "Reservations, open values and leases that ended with the connection of their client."),
}


class StoreMetrics:
    """Reads the counters of a server at each scrape."""

    def __init__(self, stats: Callable[[], StoreStats]) -> None:
        self._stats = stats
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields the metrics; none of a server that is closed."""
        try:
            stats = self._stats()
        except ClosedError:
            return
        for name, (attribute, about) in _GAUGES.items():
            yield GaugeMetricFamily(f"kvpipe_store_{name}", about, getattr(stats, attribute))
        for name, (detail, about) in _DETAIL_GAUGES.items():
            yield GaugeMetricFamily(f"kvpipe_store_{name}", about, stats.details[detail])
        for name, (attribute, about) in _COUNTERS.items():
            yield CounterMetricFamily(f"kvpipe_store_{name}", about, getattr(stats, attribute))
        for name, (detail, about) in _DETAIL_COUNTERS.items():
            yield CounterMetricFamily(f"kvpipe_store_{name}", about, stats.details[detail])

    def serve(self, host: str, port: int) -> tuple[WSGIServer, Thread]:
        """Serves `/metrics` by a thread.

        Raises:
            OSError: The port cannot be listened on.
        """
        serving: tuple[WSGIServer, Thread] = start_http_server(port, host, self.registry)
        return serving
