"""Counters of the store connector in vLLM's own `/metrics`, and in the line that vLLM logs at intervals.

Source: `kv_connector/v1/metrics.py` of vLLM 0.32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

_MIB = 1 << 20
# Of `data`: counters, each with a number for each label value, which add up; and states, of which the latest counts.
_STATES = ("breakers", "forcing", "namespaces")
_COUNTERS = ("loaded", "missed", "saved", "skipped", "decisions", "first_tokens", "bytes", "seconds", "operations")


class KVStoreStats(KVConnectorStats):
    """Changes since the last step. `data` has only changed values, of types that msgpack can write."""

    def add(self, counter: str, label: str, amount: float = 1) -> None:
        """Adds to one of the counters."""
        if amount:
            values = self.data.setdefault(counter, {})
            values[label] = values.get(label, 0) + amount

    def set_breaker(self, name: str, state: str) -> None:
        """Sets whether the store is used."""
        self.data.setdefault("breakers", {})[name] = state

    def set_forcing(self, *, is_forcing: bool) -> None:
        """Sets whether the engine forces first tokens."""
        self.data["forcing"] = {"engine": int(is_forcing)}

    def set_namespace(self, namespace: bytes, *, is_shared: bool) -> None:
        """Sets whether the engine has KV in common with all others that have this namespace."""
        self.data.setdefault("namespaces", {})[namespace.hex()] = int(is_shared)

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """True if nothing has changed."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVStoreStats:
        """Returns this object with the later stats added."""
        for counter in _COUNTERS:
            for label, amount in other.data.get(counter, {}).items():
                # A new dict: vLLM gives the same data to several loggers.
                self.data[counter] = dict(self.data.get(counter, {}))
                self.add(counter, label, amount)
        for state in _STATES:
            if state in other.data:
                self.data[state] = {**self.data.get(state, {}), **other.data[state]}
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the interval's figures for vLLM's log line."""
        num_bytes = self.data.get("bytes", {})
        figures = {
            "Store chunks loaded": sum(self.data.get("loaded", {}).values()),
            "Store chunks missed": sum(self.data.get("missed", {}).values()),
            "Store chunks saved": sum(self.data.get("saved", {}).values()),
            "Store MiB loaded": round(num_bytes.get("load", 0) / _MIB, 3),
            "Store MiB saved": round(num_bytes.get("save", 0) / _MIB, 3),
        }
        return figures if self.data else {}


class KVStorePromMetrics(KVConnectorPromMetrics):
    """The store connector's Prometheus metrics in one API server."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._chunks = self._counter_cls(
            name="vllm:kvpipe_store_chunks",
            documentation="Chunks of KV that were loaded, missed, saved or skipped, by reason.",
            labelnames=[*labelnames, "result", "reason"],
        )
        self._decisions = self._counter_cls(
            name="vllm:kvpipe_store_decisions",
            documentation="Requests by why their stored KV was loaded or computed.",
            labelnames=[*labelnames, "reason"],
        )
        self._first_tokens = self._counter_cls(
            name="vllm:kvpipe_store_first_tokens",
            documentation="Requests with a handoff through the store, by whether their first token is the producer's.",
            labelnames=[*labelnames, "result", "reason"],
        )
        by_operation = [*labelnames, "operation"]
        self._by_operation = {
            "bytes": self._counter_cls(
                name="vllm:kvpipe_store_bytes",
                documentation="Bytes of KV that were loaded from and saved into the store, of all ranks.",
                labelnames=by_operation,
            ),
            "seconds": self._counter_cls(
                name="vllm:kvpipe_store_seconds",
                documentation="Time of the store's operations, added up.",
                labelnames=by_operation,
            ),
            "operations": self._counter_cls(
                name="vllm:kvpipe_store_operations",
                documentation="Operations of the store: lookups, loads of requests, saves of chunks.",
                labelnames=by_operation,
            ),
        }
        self._breakers = self._gauge_cls(
            name="vllm:kvpipe_store_breaker_open",
            documentation="Whether the store is not used because it failed: 1, or 0.5 while it is tried again.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "breaker"],
        )

        self._namespaces = self._gauge_cls(
            name="vllm:kvpipe_store_is_shared",
            documentation="Whether the engine has KV in common with others of this namespace.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "namespace"],
        )
        # The proxy reads this one, see `kvpipe.proxy.descriptions.StoreDescriber`.
        self._reasoning_parser = str(vllm_config.structured_outputs_config.reasoning_parser or "")
        self._forcing = self._gauge_cls(
            name="vllm:kvpipe_store_forces_first_tokens",
            documentation="Whether the engine goes on from the first token that another one has sampled.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "reasoning_parser"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what has changed in a step of an engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for result in ("loaded", "missed", "saved", "skipped"):
            for reason, count in transfer_stats_data.get(result, {}).items():
                self._chunks.labels(*labels, result, reason).inc(count)
        for reason, count in transfer_stats_data.get("decisions", {}).items():
            self._decisions.labels(*labels, reason).inc(count)
        for reason, count in transfer_stats_data.get("first_tokens", {}).items():
            result = "exact" if reason == "none" else "sampled"
            self._first_tokens.labels(*labels, result, reason).inc(count)
        for name, counter in self._by_operation.items():
            for operation, amount in transfer_stats_data.get(name, {}).items():
                counter.labels(*labels, operation).inc(amount)
        for breaker, state in transfer_stats_data.get("breakers", {}).items():
            level = {"closed": 0, "half-open": 0.5}.get(state, 1)
            self._breakers.labels(*labels, breaker).set(level)
        for namespace, is_shared in transfer_stats_data.get("namespaces", {}).items():
            self._namespaces.labels(*labels, namespace).set(is_shared)
        for is_forcing in transfer_stats_data.get("forcing", {}).values():
            self._forcing.labels(*labels, self._reasoning_parser).set(is_forcing)
