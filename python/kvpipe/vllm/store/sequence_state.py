"""The sequence state of a request whose prompt is computed: the record of its entry in the store."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import numpy as np

from kvpipe import _kvpipe
from kvpipe.vllm.store.keys import FORMAT_VERSION

_MAGIC = b"kvpstate"
# Magic, version, handoff, first token, finish reason, length of the prompt, its hash, hashes of adapter and sampling.
_BODY = struct.Struct("<8sI16sq8sQ32s32s32s")
_CHECKSUM = struct.Struct("<Q")


@dataclass(frozen=True, kw_only=True)
class SequenceState:
    """State of a prompt that its producer has finished, for the consumer.

    Attributes:
        handoff: The handoff's id.
        first_token: The token that the producer sampled.
        finish_reason: Finish reason of the producer's request: `length` or `stop`.
        num_prompt_tokens: Length of the prompt.
        prompt_hash: Hash of all of its tokens, see `prompt_hash`.
        adapter_hash: Hash of the content of its LoRA adapter, see `adapter_hash`.
        sampling_hash: Hash of the token's inputs besides the prompt, see `Sampling`.
    """

    handoff: bytes
    first_token: int
    finish_reason: str
    num_prompt_tokens: int
    prompt_hash: bytes
    adapter_hash: bytes
    sampling_hash: bytes

    def packed(self) -> bytes:
        """Returns the record."""
        facts = self.handoff, self.first_token, self.finish_reason.encode(), self.num_prompt_tokens
        body = _BODY.pack(_MAGIC, FORMAT_VERSION, *facts, self.prompt_hash, self.adapter_hash, self.sampling_hash)
        return body + _CHECKSUM.pack(_checksum(body))

    @classmethod
    def unpacked(cls, record: bytes) -> SequenceState | None:
        """Reads a record; returns `None` if `packed` did not write it: any client of the store may have changed it."""
        if len(record) != _BODY.size + _CHECKSUM.size:
            return None
        body = record[: _BODY.size]
        if _CHECKSUM.pack(_checksum(body)) != record[_BODY.size :]:
            return None
        magic, version, handoff, first_token, finish_reason, num_prompt_tokens, *hashes = _BODY.unpack(body)
        if (magic, version) != (_MAGIC, FORMAT_VERSION):
            return None
        prompt_hash, adapter_hash, sampling_hash = hashes
        return cls(
            handoff=handoff,
            first_token=first_token,
            finish_reason=finish_reason.rstrip(b"\0").decode("ascii", "replace"),
            num_prompt_tokens=num_prompt_tokens,
            prompt_hash=prompt_hash,
            adapter_hash=adapter_hash,
            sampling_hash=sampling_hash,
        )


def adapter_hash(adapter: str) -> bytes:
    """Hashes the content of a LoRA adapter, which is empty without one."""
    return hashlib.sha256(adapter.encode()).digest()


def _checksum(body: bytes) -> int:
    return _kvpipe.checksums(np.frombuffer(body, np.uint8), [0], len(body))[0]
