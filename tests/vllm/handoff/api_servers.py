"""Two API servers that share Prometheus' folder, for test_stats.py: each gets a part of the stats, one shows all."""

import os
import sys
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest, multiprocess
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

import tests.vllm.handoff.conftest  # noqa: F401 - sets vLLM up
from kvpipe.vllm.handoff.stats import KVPipeStats
from kvpipe.vllm.plugin import register


def stats(num_leased_blocks: int) -> KVPipeStats:
    """One handoff, and a number of leased blocks."""
    both = KVPipeStats()
    counts = {"received_tokens": 32, "missing_tokens": 0, "recomputed_tokens": 0, "received_bytes": 1}
    both.add_handoff("full", "none", handover_s=0.1, **counts)
    both.set_leased_blocks(num_leased_blocks)
    return both


def main() -> None:
    """The child is the other server. It shows its part first."""
    register()
    transfer = KVTransferConfig(kv_connector="KVPipeConnector", kv_role="kv_both")
    prom = KVConnectorProm(
        SimpleNamespace(kv_transfer_config=transfer), ["model_name", "engine"], {0: ["tiny", "0"], 1: ["tiny", "1"]}
    )
    other = os.fork()
    if not other:
        prom.observe(stats(5).to_dict(), 0)
        prom.observe(stats(7).to_dict(), 1)
        os._exit(0)
    os.waitpid(other, 0)
    prom.observe(stats(3).to_dict(), 0)
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    sys.stdout.write(generate_latest(registry).decode())


if __name__ == "__main__":
    main()
