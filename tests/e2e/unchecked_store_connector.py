"""KVStoreConnector that uses whatever it reads, while the file exists that `KVPIPE_TEST_FLIP` names.

It proves that the tests could see wrong KV at all.
"""

import os
from pathlib import Path
from typing import Any

from kvpipe import store_connector
from kvpipe.vllm.store import values

_fault = values.fault


def _unless_ordered(*arguments: Any) -> str:
    return "" if Path(os.environ["KVPIPE_TEST_FLIP"]).exists() else _fault(*arguments)


class KVStoreConnector(store_connector.KVStoreConnector):
    """Verifies chunks unless a test orders otherwise."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Replaces the check of this process."""
        values.fault = _unless_ordered
        super().register_kv_caches(kv_caches)
