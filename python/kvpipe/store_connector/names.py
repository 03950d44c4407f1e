"""The keys of one engine: what its ranks' chunks and entries are called in the store."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from kvpipe.connector.fingerprint import fingerprint, merge_ranks
from kvpipe.connector.model_files import NOT_COMPARED
from kvpipe.exceptions import ConfigError
from kvpipe.store.serde import Serde
from kvpipe.store_connector.keys import chunk_ids, engine_namespace, entry_id, rank_namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvpipe.store_connector.config import StoreConnectorConfig


class Names:
    """Names chunks and entries of one engine.

    Args:
        vllm_config: vLLM's configuration.
        config: Settings of the connector.
        hash_block_size: Tokens of each of a request's block hashes.

    Attributes:
        num_ranks: Workers of the engine.
        namespace: What the namespaces of the ranks have in common; empty before all workers have reported.
        epoch: Separates an engine whose weights may have changed from what is stored; empty before that.

    Raises:
        ConfigError: The files of the model cannot be compared, or vLLM's block hashes can collide.
    """

    def __init__(self, vllm_config: VllmConfig, config: StoreConnectorConfig, hash_block_size: int) -> None:
        self.num_ranks = int(vllm_config.parallel_config.world_size)
        self.namespace = self.epoch = b""
        self._config = config
        self._hashes_in_chunk = config.chunk_size // hash_block_size
        self._fingerprint = fingerprint(vllm_config)
        self._ranks: dict[int, list[tuple[str, str]]] = {}
        _check_identity(self._fingerprint, config.namespace, vllm_config.cache_config.prefix_caching_hash_algo)

    def introduce(self, properties: Mapping[int, list[tuple[str, str]]]) -> bool:
        """Notes what workers add to the fingerprint. Returns whether the namespace is known now, and was not before."""
        self._ranks.update(properties)
        if self.namespace or len(self._ranks) < self.num_ranks:
            return False
        facts = [*self._fingerprint, *merge_ranks([self._ranks[rank] for rank in sorted(self._ranks)])]
        self.namespace = engine_namespace(
            facts,
            num_ranks=self.num_ranks,
            chunk_size=self._config.chunk_size,
            serde=Serde.parse(self._config.serde).identity,
            namespace=self._config.namespace,
        )
        return True

    def chunk_ids(self, request: Request, num_chunks: int, adapter: str) -> list[bytes]:
        """Returns the ids of the first chunks of a request's prompt."""
        return chunk_ids(
            request.block_hashes,
            num_chunks=num_chunks,
            hashes_in_chunk=self._hashes_in_chunk,
            adapter=adapter,
            epoch=self.epoch,
        )

    def entry_keys(self, handoff: bytes) -> list[bytes]:
        """Returns the key of each rank's entry of a handoff."""
        return self.keys([entry_id(handoff)])

    def keys(self, ids: Iterable[bytes]) -> list[bytes]:
        """Returns the keys of all ranks: for each rank, and in it for each id."""
        namespaces = [rank_namespace(self.namespace, rank) for rank in range(self.num_ranks)]
        return [namespace + each for namespace in namespaces for each in ids]

    def reset(self) -> None:
        """Changes all names: the weights may have changed, and nobody knows into which."""
        self.epoch = secrets.token_bytes(16)


def _check_identity(properties: list[tuple[str, str]], namespace: str, hash_algorithm: str) -> None:
    """Refuses an engine whose keys could name another engine's KV.

    Raises:
        ConfigError: It is one.
    """
    if hash_algorithm.startswith("xxhash"):
        message = (
            f"prefix_caching_hash_algo={hash_algorithm!r}: hashes of different prompts can be equal, and a store is "
            "shared; write --prefix-caching-hash-algo sha256"
        )
        raise ConfigError(message)
    unknown = next(((name, value) for name, value in properties if NOT_COMPARED in value), None)
    if unknown and not namespace:
        message = (
            f"{unknown[0]} is {unknown[1]}: KV of another model could be taken for this one's; have the files on this "
            'disk, or write a "namespace" that no other model has into kv_connector_extra_config'
        )
        raise ConfigError(message)
