"""KVPipeConnector with faults that a test can order: a block is spoilt before or after its checksum is compared, or
decode keeps its own KV of a prompt's last token.

Before: at the producer, which has computed the checksum already, so that other bytes arrive than were announced. After:
at the consumer, where only a test would put it: it proves that the tests could see wrong KV at all. The order is the
content of the file that `KVPIPE_TEST_FLIP` names: `source`, the index of a KV cache group for the consumer's side
(nothing: the first), `heads`, which change places there, or `recomputed`. The file goes when the order has been carried
out at the source, which is before the producer has answered.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch

from kvpipe import connector

# Neither the first nor the last of a prompt of some blocks.
SPOILT = 2
# The checksums of a step's blocks take less than a millisecond, in a thread of their own.
SUMMED_AFTER_S = 1.0


class KVPipeConnector(connector.KVPipeConnector):
    """Flips the values of one block in one layer, when ordered."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keeps the cache of the first layer of each group."""
        super().register_kv_caches(kv_caches)
        self._order = Path(os.environ["KVPIPE_TEST_FLIP"])
        self._first_layers = [kept[0] for kept in self._of_worker()._kept._caches]
        self._source: tuple[int, int] | None = None
        self._destinations: dict[str, list[list[int]]] = {}
        self._requests: dict[bytes, str] = {}

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Has nothing restored, when ordered."""
        if self._is_ordered("recomputed"):
            kv_connector_metadata.restores.clear()
        super().handle_preemptions(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Notes the blocks of each load, and of a prompt of several blocks that is computed in this step alone.

        Blocks that the scheduler role has committed are spoiled here, before they are used: no end is reported.
        """
        for load in connector_metadata.loads:
            self._destinations[load.request_id] = [block_ids for _, block_ids in load.parts]
            self._requests[load.handoff] = load.request_id
        for handoff in connector_metadata.committed:
            self._spoil_loaded(self._requests.pop(handoff, ""))
        self._source = self._chosen(connector_metadata.ready)
        super().bind_connector_metadata(connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Spoils one of the blocks that this step has lent, or the first block of what has just arrived."""
        if self._source is not None and self._is_ordered("source"):
            group, block_id = self._source
            time.sleep(SUMMED_AFTER_S)
            self._first_layers[group][block_id].neg_()
            self._order.unlink()
        sent, received = super().get_finished(finished_req_ids)
        for request_id in received or ():
            self._spoil_loaded(request_id)
        return sent, received

    def _chosen(self, ready: list[Any]) -> tuple[int, int] | None:
        """A block that is ready with this step: of the last group, or of a prompt of several blocks."""
        if len(self._first_layers) > 1:
            return (ready[-1].group, ready[-1].block_ids[0]) if ready else None
        whole = [each.block_ids for each in ready if each.first == 0 and len(each.block_ids) > SPOILT]
        return (0, whole[-1][SPOILT]) if whole else None

    def _spoil_loaded(self, request_id: str) -> None:
        loaded = self._destinations.pop(request_id, [])
        for group, block_ids in enumerate(loaded):
            if block_ids and (self._is_ordered(str(group)) or (group == 0 and self._is_ordered(""))):
                self._first_layers[group][block_ids[0]].neg_()
            elif block_ids and self._is_ordered("heads"):
                block = self._first_layers[group][block_ids[0]]
                block.copy_(block.roll(1, dims=0))

    def _is_ordered(self, order: str) -> bool:
        return self._order.exists() and self._order.read_text() == order
