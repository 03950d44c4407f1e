"""vLLM's real scheduler with both roles of KVPipeConnector, and the store tests' model: other KV, other tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.vllm.handoff.engine import engine_config
from tests.vllm.store.engine import Engine

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

# Those of the configuration.
LAYERS = ("layer.0", "layer.1", "layer.2")


class HandoffEngine(Engine):
    """An engine with KVPipeConnector.

    Attributes:
        results: Results of the handoffs that ended here as their consumer, as metrics count them.
        num_leased: Blocks that it leases to consumers, as metrics say.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.results: dict[str, int] = {}
        self.num_leased = 0
        super().__init__(model, "", config=engine_config(model, **settings), layers=LAYERS)
        [worker] = self.workers
        self.scheduler.connector.set_xfer_handshake_metadata({0: worker.get_handshake_metadata()})

    def _result(self, worker: Any, output: Any, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
        result = super()._result(worker, output, sampled)
        if result.kv_connector_output is not None:
            result.kv_connector_output.failed_recving = worker._worker.drain_failed()
        return result

    def _count(self, data: dict[str, Any]) -> None:
        for handoff in data.get("handoffs", ()):
            self.results[handoff["result"]] = self.results.get(handoff["result"], 0) + 1
        self.num_leased = data.get("leased_blocks", self.num_leased)

    @property
    def address(self) -> str:
        """Address of its control port."""
        return self.role.address
