"""The keys of one engine: what its ranks' chunks and entries are called in the store."""

from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

import torch
from vllm.logger import init_logger

from kvpipe.exceptions import ConfigError
from kvpipe.store.serde import Serde
from kvpipe.vllm.fingerprint import fingerprint
from kvpipe.vllm.model_files import NOT_COMPARED
from kvpipe.vllm.rank_properties import merge_ranks
from kvpipe.vllm.store.keys import Feature, chunk_ids, engine_namespace, entry_id, rank_namespace
from kvpipe.vllm.store.weights import PROPERTY

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from kvpipe.vllm.store.config import StoreConnectorConfig


logger = init_logger("vllm.kvpipe.store")


class Names:
    """Names chunks and entries of one engine.

    Args:
        vllm_config: vLLM's configuration.
        config: Settings of the connector.

    Attributes:
        num_ranks: Workers of the engine.
        namespace: Common part of the ranks' namespaces; empty before all workers have reported.
        private_reason: Reason for which no other engine can have this namespace; empty if others can.
        are_features_named: True if images and the like have identifiers that are hashes of their content.

    Raises:
        ConfigError: The files of the model cannot be compared, or vLLM's block hashes can collide.
    """

    def __init__(self, vllm_config: VllmConfig, config: StoreConnectorConfig) -> None:
        self.num_ranks = int(vllm_config.parallel_config.world_size)
        self.namespace, self.private_reason = b"", ""
        self.are_features_named = _are_features_named(vllm_config)
        self._config = config
        num_stages = vllm_config.parallel_config.pipeline_parallel_size
        # A rank stores the KV of its own layers.
        self._fingerprint = [*fingerprint(vllm_config), ("pipeline parallel size", str(num_stages))]
        self._ranks: dict[int, list[tuple[str, str]]] = {}
        # Properties of the workers when the KV was computed that the prefix cache has kept over resets. None if it has
        # kept none, empty if they differ.
        self._kept: list[tuple[str, str]] | None = None
        _check_identity(self._fingerprint, config.namespace, vllm_config.cache_config.prefix_caching_hash_algo)

    @property
    def is_shared(self) -> bool:
        """True if the namespace is known, and others can have it."""
        return bool(self.namespace) and not self.private_reason

    def introduce(self, properties: Mapping[int, list[tuple[str, str]]]) -> bool:
        """Notes the workers' additions to the fingerprint. Returns true if this determines the namespace."""
        self._ranks.update(properties)
        if self.namespace or len(self._ranks) < self.num_ranks:
            return False
        ranks = self._merged()
        unknown = next((what for name, what in ranks if name == PROPERTY and NOT_COMPARED in what), "")
        self.private_reason = f"its weights may have changed, and are {unknown}; restart it" if unknown else ""
        facts = [*self._fingerprint, *ranks]
        if self._kept is not None and self._kept != ranks:
            self._kept = []
            facts.append(("prefix cache", secrets.token_hex(16)))
            self.private_reason = (
                "its weights have changed, and its prefix cache has KV of those before; reset it while no request runs"
            )
        self.namespace = engine_namespace(
            facts,
            num_ranks=self.num_ranks,
            chunk_size=self._config.chunk_size,
            serde=Serde.parse(self._config.serde).identity,
            namespace=self._config.namespace,
        )
        return True

    def chunk_ids(self, request: Request, num_chunks: int, adapter: str) -> list[bytes]:
        """Returns the ids of the first chunks of a request's prompt.

        Args:
            request: vLLM's request.
            num_chunks: Number of ids.
            adapter: Content of its LoRA adapter; empty without one.
        """
        positions = [(each.identifier, each.mm_position) for each in request.mm_features or ()]
        return chunk_ids(
            request.all_token_ids if request.prompt_token_ids is None else request.prompt_token_ids,
            num_chunks=num_chunks,
            chunk_size=self._config.chunk_size,
            adapter=adapter,
            salt=request.cache_salt or "",
            features=[Feature(name, place.offset, place.offset + place.length) for name, place in positions],
            embeddings=None if request.prompt_embeds is None else lambda first, end: _embeddings(request, first, end),
        )

    def entry_keys(self, handoff: bytes) -> list[bytes]:
        """Returns the key of each rank's entry of a handoff."""
        return self.keys([entry_id(handoff)])

    def keys(self, ids: Iterable[bytes]) -> list[bytes]:
        """Returns the keys of all ranks: for each rank, and in it for each id."""
        namespaces = [rank_namespace(self.namespace, rank) for rank in range(self.num_ranks)]
        return [namespace + each for namespace in namespaces for each in ids]

    def reset(self, *, is_cache_empty: bool) -> None:
        """Forgets the namespace until all workers have reported again: the weights may have changed.

        Args:
            is_cache_empty: True if the engine's prefix cache was emptied, too. Otherwise it keeps KV of the weights
                before, and KV computed after that depends on it: with other weights that is no KV to share.
        """
        if is_cache_empty:
            self._kept = None
        elif not self.namespace:  # the weights between two resets are not known
            self._kept = []
        elif self._kept is None:
            self._kept = self._merged()
        self.namespace, self.private_reason = b"", ""
        self._ranks.clear()

    def _merged(self) -> list[tuple[str, str]]:
        return merge_ranks([self._ranks[rank] for rank in sorted(self._ranks)])


def _are_features_named(vllm_config: VllmConfig) -> bool:
    """True if vLLM hashes the content of images; without its caches it numbers them (0.32, `renderers/base.py`)."""
    settings = vllm_config.model_config.multimodal_config
    is_numbered = (
        settings is not None
        and settings.mm_processor_cache_gb == 0
        and not vllm_config.cache_config.enable_prefix_caching
    )
    if is_numbered:
        logger.warning(
            "store.unnamed requests with images, audio or video share no KV: mm_processor_cache_gb=0 without prefix "
            "caching; start this instance with --enable-prefix-caching or another --mm-processor-cache-gb"
        )
    return not is_numbered


def _embeddings(request: Request, first: int, end: int) -> bytes:
    """Returns an identifier of the embeddings of some tokens, and of the positions that are tokens all the same."""
    content = request.prompt_embeds[first:end].contiguous().view(torch.uint8)
    is_token = request.prompt_is_token_ids
    return hashlib.sha256(content.numpy()).digest() + bytes(is_token[first:end] if is_token else ())


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
