"""Settings of the store connector.

`kv_connector_extra_config`, then `KVPIPE_STORE_*`, then the file that `LMCACHE_CONFIG_FILE` names, then the default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvpipe.exceptions import ConfigError
from kvpipe.store.serde import Serde
from kvpipe.store.urls import resolve_url
from kvpipe.vllm.settings import check_on_load_failure, read_settings
from kvpipe.vllm.store.lmcache import read_lmcache_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = init_logger("vllm.kvpipe.store")


@dataclass(frozen=True, kw_only=True)
class StoreConnectorConfig:
    """Settings of one engine.

    Attributes:
        store: URL of the store, see `kvpipe.store.open_store`. Required.
        namespace: Text that is part of every key: instances with another one see nothing of each other. It is needed
            where the files of the model cannot be compared; an equal namespace states that they are the same.
        chunk_size: Tokens of a chunk, a multiple of vLLM's block size. Larger: fewer keys, and a longer tail that is
            computed by everyone.
        serde: Encoding of KV: `naive`, the bytes as they are; or one that loses precision, see `kvpipe.store.serde`.
        on_load_failure: Policy for a request whose KV is in the store and cannot be loaded, see `ConnectorConfig`.
        always_load: Loads stored KV even where computing it was measured to be faster.
        load_timeout_s: Seconds after which a load ends with what it has. It is less where computing takes less.
        lookup_timeout_s: Seconds after which a request is computed if the store has not answered its lookup.
        num_io_threads: Threads of a worker that load chunks; half as many save them.
        staging_bytes: Memory of a worker for chunks on their way into the store. Chunks without space are not saved.
    """

    store: str = ""
    namespace: str = ""
    chunk_size: int = 256
    serde: str = "naive"
    on_load_failure: str = ""
    always_load: bool = False
    load_timeout_s: float = 10.0
    lookup_timeout_s: float = 1.0
    num_io_threads: int = 4
    staging_bytes: int = 512 << 20

    @classmethod
    def parse(cls, extra: Mapping[str, Any], block_size: int) -> StoreConnectorConfig:
        """Reads the settings of an engine whose blocks have `block_size` tokens.

        Raises:
            ConfigError: A key is unknown or a value is bad; the message names it and what is expected.
        """
        lmcache = read_lmcache_settings(os.environ)
        for key, reason in lmcache.ignored.items():
            logger.info("config.ignored %s of LMCache's file: %s", key, reason)
        config = cls(**read_settings(cls, extra, variable_of, lmcache.settings))
        config._check(block_size)
        return config

    def _check(self, block_size: int) -> None:
        if not self.store:
            message = 'store is not set: write "store": "kvpipe://host:port" into kv_connector_extra_config'
            raise ConfigError(message)
        resolve_url(self.store)
        if self.chunk_size % block_size:
            message = f"chunk_size={self.chunk_size}: expected a multiple of vLLM's block size, {block_size} tokens"
            raise ConfigError(message)
        Serde.parse(self.serde)
        check_on_load_failure(self.on_load_failure)


def variable_of(name: str) -> str:
    """Returns the environment variable of a setting."""
    return "KVPIPE_STORE" if name == "store" else f"KVPIPE_STORE_{name.upper()}"
