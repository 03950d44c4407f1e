"""Counters of the connector in vLLM's own `/metrics`, and in the line that vLLM logs at intervals.

The roles collect; vLLM takes what has changed after each step and passes it on to the API servers as plain data.

Source: `kv_connector/v1/metrics.py` of vLLM 0.32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import PromMetric, PromMetricT

_HANDOVER_BUCKETS_S = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]
_MIB = 1 << 20


class KVPipeStats(KVConnectorStats):
    """Changes since the last step. `data` has only changed values, of types that msgpack can write.

    `handoffs` are those that ended here, one dict each: see `add_handoff`. `leased_blocks` is a number. `sessions` has,
    by rank, the number of sessions by data path. The last two are states, of which the latest counts.
    """

    def add_handoff(self, result: str, reason: str, *, handover_s: float | None, **counts: int) -> None:
        """Adds a handoff that has ended, as its consumer.

        Args:
            result: Its result.
            reason: The `LossReason`.
            handover_s: Seconds from the request's arrival until its prompt was done; `None` if that never came.
            counts: `received_tokens`, `missing_tokens`, `recomputed_tokens` and `received_bytes`.
        """
        handoff = {"result": result, "reason": reason, "handover_s": handover_s, **counts}
        self.data.setdefault("handoffs", []).append(handoff)

    def set_leased_blocks(self, num_blocks: int) -> None:
        """Sets the number of blocks that this engine leases to consumers."""
        self.data["leased_blocks"] = num_blocks

    @classmethod
    def of_sessions(cls, rank: int, num_remote_read: int, num_stream: int) -> KVPipeStats:
        """Returns stats of how many sessions the agent of a rank has, by data path."""
        stats = cls()
        stats.set_sessions(rank, num_remote_read=num_remote_read, num_stream=num_stream)
        return stats

    def set_sessions(self, rank: int, *, num_remote_read: int, num_stream: int) -> None:
        """Sets how many sessions the agent of a rank has, by data path."""
        self.data["sessions"] = {str(rank): {"remote_read": num_remote_read, "stream": num_stream}}

    def reset(self) -> None:
        """Forgets everything."""
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        """True if nothing has changed."""
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVPipeStats:
        """Returns this object with the later stats added."""
        later = other.data
        if "handoffs" in later:
            # A new list: vLLM gives the same data to several loggers.
            self.data["handoffs"] = [*self.data.get("handoffs", ()), *later["handoffs"]]
        if "leased_blocks" in later:
            self.data["leased_blocks"] = later["leased_blocks"]
        if "sessions" in later:
            self.data["sessions"] = self.data.get("sessions", {}) | later["sessions"]
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the interval's figures for vLLM's log line."""
        figures: dict[str, int | float] = {}
        if handoffs := self.data.get("handoffs"):
            handover_s = [each["handover_s"] for each in handoffs if each["handover_s"] is not None]
            figures = {
                "Handoffs": len(handoffs),
                "Full handoffs": sum(each["result"] == "full" for each in handoffs),
                "Recomputed tokens": sum(each["recomputed_tokens"] for each in handoffs),
                "MiB received": round(sum(each["received_bytes"] for each in handoffs) / _MIB, 3),
                "Avg hand-over (ms)": round(1000 * sum(handover_s) / max(1, len(handover_s)), 1),
            }
        if "leased_blocks" in self.data:
            figures["Leased blocks"] = self.data["leased_blocks"]
        for data_path in ("remote_read", "stream") if "sessions" in self.data else ():
            ranks = self.data["sessions"].values()
            figures[f"Sessions ({data_path})"] = sum(sessions[data_path] for sessions in ranks)
        return figures


class KVPipePromMetrics(KVConnectorPromMetrics):
    """The connector's Prometheus metrics in one API server."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._handoffs = self._counter_cls(
            name="vllm:kvpipe_handoffs",
            documentation="Handoffs that ended at this engine as their consumer, by result and reason.",
            labelnames=[*labelnames, "result", "reason"],
        )
        received_tokens = self._counter_cls(
            name="vllm:kvpipe_handoff_received_tokens",
            documentation="Prompt tokens whose KV arrived from a producer and was verified.",
            labelnames=labelnames,
        )
        missing_tokens = self._counter_cls(
            name="vllm:kvpipe_handoff_missing_tokens",
            documentation="Prompt tokens whose KV was to come from a producer and did not.",
            labelnames=labelnames,
        )
        recomputed_tokens = self._counter_cls(
            name="vllm:kvpipe_handoff_recomputed_tokens",
            documentation="Prompt tokens that this engine computed although their KV was to come.",
            labelnames=labelnames,
        )
        received_bytes = self._counter_cls(
            name="vllm:kvpipe_handoff_received_bytes",
            documentation="Bytes of KV that were read from producers, repeated reads included.",
            labelnames=labelnames,
        )
        self._counters = {
            "received_tokens": create_metric_per_engine(received_tokens, per_engine_labelvalues),
            "missing_tokens": create_metric_per_engine(missing_tokens, per_engine_labelvalues),
            "recomputed_tokens": create_metric_per_engine(recomputed_tokens, per_engine_labelvalues),
            "received_bytes": create_metric_per_engine(received_bytes, per_engine_labelvalues),
        }
        handover = self._histogram_cls(
            name="vllm:kvpipe_handover_seconds",
            documentation="Time from a request's arrival at this engine's scheduler until its prompt was done.",
            buckets=_HANDOVER_BUCKETS_S,
            labelnames=labelnames,
        )
        self._handover = create_metric_per_engine(handover, per_engine_labelvalues)
        leased_blocks = self._gauge_cls(
            name="vllm:kvpipe_leased_blocks",
            documentation="Blocks of finished prefills that this engine keeps for consumers.",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        self._leased_blocks = create_metric_per_engine(leased_blocks, per_engine_labelvalues)
        self._sessions = self._gauge_cls(
            name="vllm:kvpipe_sessions",
            documentation="Data sessions of this engine's workers, by how they get their peers' bytes.",
            multiprocess_mode="mostrecent",
            labelnames=[*labelnames, "data_path", "rank"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds what has changed in a step of an engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for handoff in transfer_stats_data.get("handoffs", ()):
            self._handoffs.labels(*labels, handoff["result"], handoff["reason"]).inc()
            for name, counters in self._counters.items():
                counters[engine_idx].inc(handoff[name])
            if handoff["handover_s"] is not None:
                self._handover[engine_idx].observe(handoff["handover_s"])
        if "leased_blocks" in transfer_stats_data:
            self._leased_blocks[engine_idx].set(transfer_stats_data["leased_blocks"])
        for rank, sessions in transfer_stats_data.get("sessions", {}).items():
            for data_path, num_sessions in sessions.items():
                self._sessions.labels(*labels, data_path, rank).set(num_sessions)
