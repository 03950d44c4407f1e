"""KVPipeConnector with faults that a test can order: a block is spoilt before or after its checksum is compared, or
decode keeps its own KV of a prompt's last token.

Before: at the producer, which has computed the checksum already, so that other bytes arrive than were announced. After:
at the consumer, where only a test would put it: it proves that the tests could see wrong KV at all. The order is the
content of the file that `KVPIPE_TEST_FLIP` names: `source`, nothing for the consumer's side, or `recomputed`. The file
goes when the order has been carried out at the source, which is before the producer has answered.
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
        """Keeps the first layer's cache."""
        super().register_kv_caches(kv_caches)
        self._order = Path(os.environ["KVPIPE_TEST_FLIP"])
        self._first_layer = next(iter(kv_caches.values()))
        self._sources: list[int] = []
        self._destinations: dict[str, int] = {}
        self._requests: dict[bytes, str] = {}

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Notes the blocks of each load, and of a prompt of several blocks that is computed in this step alone.

        Blocks that the scheduler role has committed are spoiled here, before they are used: no end is reported.
        """
        for load in connector_metadata.loads:
            self._destinations[load.request_id] = load.block_ids[0]
            self._requests[load.handoff] = load.request_id
        if self._is_ordered("recomputed"):
            connector_metadata.restores.clear()
        for handoff in connector_metadata.committed:
            self._spoil_loaded(self._requests.pop(handoff, ""))
        ready = [each.block_ids for each in connector_metadata.ready if each.first == 0]
        whole = [block_ids for block_ids in ready if len(block_ids) > SPOILT]
        self._sources = whole[-1] if whole else []
        super().bind_connector_metadata(connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Spoils one of the blocks that this step has lent, or the first block of what has just arrived."""
        if self._sources and self._is_ordered("source"):
            time.sleep(SUMMED_AFTER_S)
            self._first_layer[self._sources[SPOILT]].neg_()
            self._order.unlink()
        sent, received = super().get_finished(finished_req_ids)
        for request_id in received or ():
            self._spoil_loaded(request_id)
        return sent, received

    def _spoil_loaded(self, request_id: str) -> None:
        block_id = self._destinations.pop(request_id, None)
        if block_id is not None and self._is_ordered(""):
            self._first_layer[block_id].neg_()

    def _is_ordered(self, order: str) -> bool:
        return self._order.exists() and self._order.read_text() == order
