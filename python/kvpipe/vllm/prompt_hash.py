"""The hash of a prompt, which both engines of a handoff compare."""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request


def prompt_hash(request: Request) -> bytes:
    """Hashes what a prompt's KV depends on besides the model and its adapter: token ids, images."""
    digest = hashlib.sha256(array("I", request.prompt_token_ids or ()).tobytes())
    for feature in request.mm_features or ():
        digest.update(repr((feature.identifier, feature.mm_position.offset)).encode())
    return digest.digest()
