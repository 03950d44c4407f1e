"""KVPipeConnector with one fault that a test can order: a bit of the KV that has arrived is flipped.

It proves that the tests could see wrong KV at all. The fault comes after the checksum, where only a test would put it.
The order is the existence of the file that `KVPIPE_TEST_FLIP` names.
"""

import os
from pathlib import Path
from typing import Any

import torch

from kvpipe import connector


class KVPipeConnector(connector.KVPipeConnector):
    """Flips the values of one received block in one layer, when ordered."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keeps the first layer's cache."""
        super().register_kv_caches(kv_caches)
        self._first_layer = next(iter(kv_caches.values()))
        self._destinations: dict[str, int] = {}

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Notes the first block of each load."""
        for load in connector_metadata.loads:
            self._destinations[load.request_id] = load.block_ids[0]
        super().bind_connector_metadata(connector_metadata)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Spoils the first block of what has just arrived."""
        sent, received = super().get_finished(finished_req_ids)
        for request_id in received or ():
            block_id = self._destinations.pop(request_id, None)
            if block_id is not None and Path(os.environ["KVPIPE_TEST_FLIP"]).exists():
                self._first_layer[block_id].neg_()
        return sent, received
