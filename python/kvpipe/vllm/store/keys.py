"""Names of chunks in a store, for which equal names mean equal KV, and of the entries of requests.

A name is the namespace of a rank and an id. The namespace identifies the model and everything else that decides the
bytes of its KV. It begins with the namespace of the engine, which has one quota in `StoreServer`. A chunk's id
identifies the tokens up to the end of the chunk, and what else decides their KV. An entry's id is that of its handoff.

vLLM's block hashes have no part in it: they depend on `PYTHONHASHSEED` and on the path of a LoRA adapter.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

# Part of every namespace. It changes with the format of a chunk.
FORMAT_VERSION = 1
# Length of the part of a key that `StoreServer` counts as one namespace.
ENGINE_NAMESPACE_BYTES = 14
NAMESPACE_BYTES = ENGINE_NAMESPACE_BYTES + 2
CHUNK_ID_BYTES = 32
KEY_BYTES = NAMESPACE_BYTES + CHUNK_ID_BYTES


class Feature(NamedTuple):
    """An image or the like in a prompt.

    Attributes:
        identifier: Hash of its content.
        first: Its first token in the prompt.
        end: The token after its last one.
    """

    identifier: str
    first: int
    end: int


def engine_namespace(
    properties: Iterable[tuple[str, str]], *, num_ranks: int, chunk_size: int, serde: str, namespace: str
) -> bytes:
    """Returns the common part of the namespaces of an engine's ranks.

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
    token_ids: Sequence[int],
    *,
    num_chunks: int,
    chunk_size: int,
    adapter: str = "",
    salt: str = "",
    features: Sequence[Feature] = (),
    embeddings: Callable[[int, int], bytes] | None = None,
) -> list[bytes]:
    """Returns the ids of a prompt's first chunks. Each covers all that is before the end of its chunk.

    Args:
        token_ids: The prompt, at least `num_chunks * chunk_size` tokens.
        num_chunks: Number of ids.
        chunk_size: Tokens of a chunk.
        adapter: Content of the LoRA adapter; empty without one.
        salt: The request's cache salt; empty without one.
        features: Images and the like in the prompt.
        embeddings: Returns an identifier of the embeddings of tokens, by first and end; `None` without embeddings.
    """
    ids, before = [], _digest([b"prompt", adapter.encode(), salt.encode()])
    for first in range(0, num_chunks * chunk_size, chunk_size):
        end = first + chunk_size
        parts = [before, _packed(token_ids[first:end])]
        for feature in features:
            if feature.first < end and first < feature.end:
                parts += [feature.identifier.encode(), feature.first.to_bytes(8, "little")]
        if embeddings is not None:
            parts.append(embeddings(first, end))
        before = _digest(parts)
        ids.append(before)
    return ids


def entry_id(handoff: bytes) -> bytes:
    """Returns the id of the entry of a handoff."""
    return _digest([b"entry of a handoff", handoff])


def _packed(token_ids: Sequence[int]) -> bytes:
    """Returns tokens as little-endian numbers of 32 bits."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _digest(parts: Iterable[bytes]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()
