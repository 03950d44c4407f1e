"""Names of chunks in a store, for which equal names mean equal KV, and of the entries of requests.

A name is the namespace of a rank and an id. The namespace identifies the model and everything else that decides the
bytes of its KV. It begins with the namespace of the engine, which has one quota in `StoreServer`. A chunk's id
identifies the tokens up to the end of the chunk, by vLLM's block hash. An entry's id is that of its handoff.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Part of every namespace. It changes with the format of a chunk.
FORMAT_VERSION = 1
# What `StoreServer` counts as one namespace.
ENGINE_NAMESPACE_BYTES = 14
NAMESPACE_BYTES = ENGINE_NAMESPACE_BYTES + 2
CHUNK_ID_BYTES = 32
KEY_BYTES = NAMESPACE_BYTES + CHUNK_ID_BYTES


def engine_namespace(
    properties: Iterable[tuple[str, str]], *, num_ranks: int, chunk_size: int, serde: str, namespace: str
) -> bytes:
    """Returns what the namespaces of an engine's ranks have in common.

    Args:
        properties: The engine's fingerprint, with what its workers add to it.
        num_ranks: Workers of the engine, which share the KV of a token.
        chunk_size: Tokens of a chunk.
        serde: Identity of the serde.
        namespace: The operator's own part.
    """
    numbers = [("format", FORMAT_VERSION), ("ranks", num_ranks), ("chunk size", chunk_size)]
    facts = [*numbers, ("serde", serde), ("own", namespace)]
    digest = _digest(f"{name}={value}".encode() for name, value in (*facts, *properties))
    return digest[:ENGINE_NAMESPACE_BYTES]


def rank_namespace(engine: bytes, rank: int) -> bytes:
    """Returns the namespace of one rank: each has a part of the heads or layers."""
    return engine + rank.to_bytes(NAMESPACE_BYTES - ENGINE_NAMESPACE_BYTES, "little")


def chunk_ids(
    block_hashes: Sequence[bytes], *, num_chunks: int, hashes_in_chunk: int, adapter: str, epoch: bytes
) -> list[bytes]:
    """Returns the ids of a prompt's first chunks.

    Args:
        block_hashes: vLLM's hashes. Each covers all tokens up to its block's end, images and salt included, and an
            adapter's name.
        num_chunks: How many ids.
        hashes_in_chunk: Hashes of a chunk; its last one identifies it.
        adapter: Name and content of the LoRA adapter; empty without one.
        epoch: What separates an engine whose weights may have changed from others; empty before that.
    """
    ends = range(hashes_in_chunk - 1, num_chunks * hashes_in_chunk, hashes_in_chunk)
    return [_digest([epoch, adapter.encode(), bytes(block_hashes[end])]) for end in ends]


def entry_id(handoff: bytes) -> bytes:
    """Returns the id of the entry of a handoff."""
    return _digest([b"entry of a handoff", handoff])


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()
