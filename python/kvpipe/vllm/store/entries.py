"""Handoffs through the store: what a producer's request leaves there, and which first token a consumer's gets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kvpipe import transfer_params
from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import ConsumeParams, LoadParams, SaveParams, parse
from kvpipe.vllm.first_token.continuing_scheduler import Continuations
from kvpipe.vllm.first_token.logits_processor import hide_handoff_from_workers
from kvpipe.vllm.first_token.sampling import Sampling
from kvpipe.vllm.first_token.support import FirstTokenSupport
from kvpipe.vllm.prompt_hash import prompt_hash
from kvpipe.vllm.scheduler_output import output_position
from kvpipe.vllm.store.circuit_breaker import Breaker
from kvpipe.vllm.store.keys import entry_id
from kvpipe.vllm.store.metadata import EntryCopy, EntrySave
from kvpipe.vllm.store.sequence_state import SequenceState, adapter_hash

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from kvpipe.vllm.outbox import Outbox
    from kvpipe.vllm.store.held_blocks import HeldBlocks
    from kvpipe.vllm.store.lookups import LookupAnswer, Lookups
    from kvpipe.vllm.store.metadata import StoreStepMetadata
    from kvpipe.vllm.store.names import Names
    from kvpipe.vllm.store.prompts import Prompt
    from kvpipe.vllm.store.stats import KVStoreStats

logger = init_logger("vllm.kvpipe.store")

_FINISH_REASONS = {
    RequestStatus.FINISHED_LENGTH_CAPPED: "length",
    RequestStatus.FINISHED_STOPPED: "stop",
}


class TokenReason(StrEnum):
    """Reason for which a consumer samples its own first token, for metrics. The log says more of `unsupported`."""

    NONE = "none"
    MISSING = "missing"
    UNKNOWN = "unknown"
    CORRUPT = "corrupt"
    OTHER_PROMPT = "other_prompt"
    OTHER_ADAPTER = "other_adapter"
    OTHER_SAMPLING = "other_sampling"
    UNSUPPORTED = "unsupported"


# The entry is of another request. So is the token that this request brings, which belongs to the entry.
_OTHER_REQUEST = (TokenReason.OTHER_PROMPT, TokenReason.OTHER_ADAPTER)


@dataclass
class Entry:
    """Entry of one request in the store, besides its chunks.

    Attributes:
        handoff: The handoff's id.
        is_saved: True if this engine saves it; otherwise it loads it.
        given_tokens: Consumer: the answer's first tokens, if the request brought them. A client may have them already.
            With an entry there is one, the producer's.
        is_copied: Producer: true if the workers have a copy of its KV.
        is_asked: Consumer: true if the store has been asked for it.
        is_found: Consumer: true if it is in the store, and belongs to this request. A load consumes it.
        record: Consumer: its record.
        first_token: Consumer: the token that the producer sampled, once it is known and may be forced.
        reason: Consumer: reason for which it is not.
        unsupported_reason: Consumer: the same for `unsupported`, in words.
        is_exact: Consumer: true if it is the request's first one: it was forced, or the request continues after it.
        num_computed: Consumer: prompt tokens that this engine has computed since the last preemption.
        is_reported: Consumer: true if the result has been reported, or none is to be.
    """

    handoff: bytes
    is_saved: bool
    given_tokens: tuple[int, ...] = ()
    is_copied: bool = False
    is_asked: bool = False
    is_found: bool = False
    record: bytes = b""
    first_token: int | None = None
    reason: TokenReason = TokenReason.UNKNOWN
    unsupported_reason: str = ""
    is_exact: bool = False
    num_computed: int = 0
    is_reported: bool = False


class Entries:
    """Entries of the requests of one engine.

    Args:
        vllm_config: vLLM's configuration.
        names: Names entries.
        lookups: Questions to the store.
        outbox: Outgoing messages to workers, and metrics.
        held: Blocks that workers copy.
        chunk_blocks: Blocks of a chunk.

    Attributes:
        support: This engine's support for forced first tokens.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        names: Names,
        lookups: Lookups,
        outbox: Outbox[StoreStepMetadata, KVStoreStats],
        held: HeldBlocks,
        *,
        chunk_blocks: int,
    ) -> None:
        self.support = FirstTokenSupport(vllm_config)
        self._sampling = Sampling(vllm_config)
        self._continuations = Continuations(vllm_config, [int(vllm_config.cache_config.block_size)])
        self._is_saving = vllm_config.kv_transfer_config.kv_role != "kv_consumer"
        self._block_size = int(vllm_config.cache_config.block_size)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        self._chunk_blocks = chunk_blocks
        self._names = names
        self._lookups = lookups
        self._out = outbox
        self._held = held
        # Handoffs that requests load: each has one first token, and belongs to one request.
        self._loaded: set[bytes] = set()
        # True if it is worth a wait: an entry does not come from an engine of another model, or of another store.
        self._breaker = Breaker()
        self._manager: KVCacheManager | None = None

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Stores the manager, which knows the blocks of each request."""
        self._manager = self._continuations.manager = manager

    def add(self, request: Request) -> Entry | None:
        """Returns the entry of a new request; `None` if it has no handoff through the store."""
        try:
            return self._add(request)
        except ConfigError as error:
            hide_handoff_from_workers(request)
            logger.warning("request.ignored request_id=%s it has no handoff: %s", request.request_id, error)
            return None

    def _add(self, request: Request) -> Entry | None:
        params = parse(request.kv_transfer_params, max_model_len=self._max_model_len)
        if isinstance(params, ConsumeParams) and params.producer:
            return None
        if not isinstance(params, SaveParams | LoadParams | ConsumeParams):
            return None
        given = _given_tokens(params)
        if self._names.private_reason and not given:
            return None
        if request.prompt_token_ids is None:
            message = "a prompt of embeddings has no token ids, which both engines compare"
            raise ConfigError(message)
        if isinstance(params, SaveParams):
            if not self._is_saving:
                message = "kv_role=kv_consumer: this instance saves nothing; start it with kv_role=kv_both"
                raise ConfigError(message)
            if request.max_tokens != 1:
                message = f"max_tokens={request.max_tokens}: a request that saves for another one has max_tokens=1"
                raise ConfigError(message)
        elif params.handoff in self._loaded:
            message = f"handoff {params.handoff.hex()} belongs to another request"
            raise ConfigError(message)
        else:
            self._loaded.add(params.handoff)
        # A request that another engine has begun is no handoff through the store, which has no entry of it.
        is_resumed = isinstance(params, ConsumeParams)
        is_asked = is_resumed or bool(self._names.private_reason)
        return Entry(params.handoff, isinstance(params, SaveParams), given, is_asked=is_asked, is_reported=is_resumed)

    def remove(self, request: Request, entry: Entry | None) -> None:
        """Removes an entry that was added for a request which does not use the store."""
        if entry is not None and not entry.is_saved:
            self._loaded.discard(entry.handoff)
            hide_handoff_from_workers(request)

    # --- the consumer

    def is_to_ask(self, prompt: Prompt) -> bool:
        """True if the store is to be asked for a prompt's entry."""
        entry = prompt.entry
        return entry is not None and not (entry.is_saved or entry.is_asked) and prompt.is_loadable

    def question(self, prompt: Prompt, timeout_s: float, now_s: float) -> tuple[list[bytes], float]:
        """Returns the keys of a prompt's entry if the store is to be asked for it, and until when to wait for it.

        Args:
            prompt: The prompt.
            timeout_s: Seconds that the question may take. Half of them are for the entry.
            now_s: The current time.
        """
        entry = prompt.entry
        if entry is None or not self.is_to_ask(prompt):
            return [], 0.0
        entry.is_asked = True
        until_s = now_s + timeout_s / 2 if self._breaker.allows(now_s) else 0.0
        return self._names.entry_keys(entry.handoff), until_s

    def answered(self, answer: LookupAnswer, prompt: Prompt | None, now_s: float) -> None:
        """Notes the store's answer about an entry. One that no load will consume is deleted."""
        if answer.failure or not answer.question.entry_keys:
            return
        entry = None if prompt is None else prompt.entry
        if not answer.records:
            if answer.question.until_s:
                self._breaker.failed(now_s)
            if entry is not None:
                entry.reason = TokenReason.MISSING
            return
        self._breaker.succeeded()
        if prompt is not None and entry is not None:
            self._found(prompt, entry, answer.records)
        if prompt is None or entry is None or not entry.is_found:
            self._lookups.delete(answer.question.entry_keys)

    def _found(self, prompt: Prompt, entry: Entry, records: tuple[bytes, ...]) -> None:
        state = SequenceState.unpacked(records[0])
        if state is None or len(set(records)) > 1:
            entry.reason = TokenReason.CORRUPT
            return
        entry.reason = self._difference(prompt, entry, state)
        if entry.reason in (TokenReason.CORRUPT, *_OTHER_REQUEST):
            return
        entry.is_found, entry.record = True, records[0]
        if entry.reason == TokenReason.NONE:
            entry.first_token = state.first_token

    def _difference(self, prompt: Prompt, entry: Entry, state: SequenceState) -> TokenReason:
        request = prompt.request
        if state.handoff != entry.handoff:
            return TokenReason.CORRUPT
        if (state.num_prompt_tokens, state.prompt_hash) != (request.num_prompt_tokens, prompt_hash(request)):
            return TokenReason.OTHER_PROMPT
        if state.adapter_hash != adapter_hash(prompt.adapter):
            return TokenReason.OTHER_ADAPTER
        if entry.given_tokens not in ((), (state.first_token,)):
            return TokenReason.CORRUPT
        if state.sampling_hash != self._sampling.hash(request):
            return TokenReason.OTHER_SAMPLING
        refusal = self.support.refusal([state.first_token])
        entry.unsupported_reason = self.support.unsupported_reason(request) or refusal
        return TokenReason.UNSUPPORTED if entry.unsupported_reason else TokenReason.NONE

    def release(self, prompt: Prompt) -> None:
        """Deletes the entry that a prompt does not consume. Its first token stays known."""
        entry = prompt.entry
        if entry is not None and entry.is_found:
            entry.is_found = False
            self._lookups.delete(self._names.entry_keys(entry.handoff))

    def forget(self, prompt: Prompt) -> None:
        """Forgets what other engines have sampled, and what is copied for them: the weights may be others now."""
        if prompt.entry is not None and prompt.entry.is_saved:
            if prompt.entry.is_copied:
                self._out.step.entries.append(EntrySave(prompt.request.request_id))
            prompt.entry = None
        elif prompt.entry is not None:
            self.release(prompt)
            prompt.entry.first_token = None
            # An entry of another request stays one.
            if prompt.entry.reason == TokenReason.NONE:
                prompt.entry.reason = TokenReason.UNKNOWN

    def loaded(self, prompt: Prompt, *, is_complete: bool) -> None:
        """Has a request whose prompt has been loaded continue after the producer's token, if it qualifies."""
        entry = prompt.entry
        if entry is None or not entry.is_found:
            return
        if not is_complete:
            # The ranks that have not consumed their entry will not.
            self.release(prompt)
            return
        entry.is_found = False
        if entry.first_token is not None and self._continuations.begin(prompt.request, entry.first_token):
            entry.is_exact = True

    def _force(self, prompt: Prompt, entry: Entry, num_before: int, num_new: int) -> None:
        """Forces the producer's token, or those that the request brought, in steps that may sample such an output."""
        request, position = prompt.request, output_position(prompt.request)
        if position == 0:
            if (token := self._token(prompt, entry)) is not None:
                self._out.step.first_tokens[entry.handoff] = token
                entry.is_exact = True
        elif position < len(entry.given_tokens) and entry.is_exact:
            self._out.step.first_tokens[entry.handoff] = entry.given_tokens[0]
        if entry.is_reported:
            return
        entry.num_computed += max(0, min(num_before + num_new, request.num_prompt_tokens) - num_before)
        if num_before + num_new >= request.num_prompt_tokens:
            self._report(prompt, entry)

    def _token(self, prompt: Prompt, entry: Entry) -> int | None:
        """Returns the first token to force: the entry's, or the first one that the request brought.

        A client may have the latter already, so that it need not have been sampled as this request samples.
        """
        if entry.first_token is not None or not entry.given_tokens or entry.reason in _OTHER_REQUEST:
            return entry.first_token
        unsupported = self.support.unsupported_reason(prompt.request) or self.support.refusal(entry.given_tokens)
        if unsupported:
            entry.reason, entry.unsupported_reason = TokenReason.UNSUPPORTED, unsupported
            return None
        return entry.given_tokens[0]

    def _report(self, prompt: Prompt, entry: Entry) -> None:
        entry.is_reported = True
        self._out.stats.add("first_tokens", TokenReason.NONE if entry.is_exact else entry.reason)
        logger.info(
            "handoff.end handoff=%s store=load prompt_tokens=%d computed_tokens=%d first_token=%s reason=%s",
            *(entry.handoff.hex(), prompt.request.num_prompt_tokens, entry.num_computed),
            "exact" if entry.is_exact else "sampled",
            entry.unsupported_reason or entry.reason,
        )

    # --- the producer

    def _copy(self, prompt: Prompt, entry: Entry, num_tokens: int, *, is_final: bool) -> None:
        """Has the workers copy what follows the last full chunk, with the step that completes the prompt."""
        request = prompt.request
        if entry.is_copied or num_tokens < request.num_prompt_tokens or not is_final or self._manager is None:
            return
        end = -(-request.num_prompt_tokens // self._block_size)
        block_ids = self._manager.get_block_ids(request.request_id)[0]
        copied = list(block_ids[prompt.num_chunks * self._chunk_blocks : end])
        self._out.step.copies.append(EntryCopy(request.request_id, copied, self._held.hold(copied)))
        entry.is_copied = True

    def _save(self, prompt: Prompt, entry: Entry) -> dict[str, Any] | None:
        """Has the workers save the entry of a finished request. Returns parameters for its response."""
        request, finish_reason = prompt.request, _FINISH_REASONS.get(prompt.request.status)
        if finish_reason is None or not request.num_output_tokens or not self._names.is_shared:
            self._out.step.entries.append(EntrySave(request.request_id))
            return None
        state = SequenceState(
            handoff=entry.handoff,
            first_token=request.output_token_ids[0],
            finish_reason=finish_reason,
            num_prompt_tokens=request.num_prompt_tokens,
            prompt_hash=prompt_hash(request),
            adapter_hash=adapter_hash(prompt.adapter),
            sampling_hash=self._sampling.hash(request),
        )
        self._out.step.entries.append(EntrySave(request.request_id, entry_id(entry.handoff), state.packed()))
        return transfer_params.load(entry.handoff.hex(), request.output_token_ids[0])

    # --- both

    def scheduled(self, prompt: Prompt, num_before: int, num_new: int, *, is_final: bool) -> None:
        """Forces a scheduled request's first outputs, or has the workers copy the end of its KV.

        Args:
            prompt: The prompt.
            num_before: Tokens computed before this step.
            num_new: Tokens of this step.
            is_final: True if all tokens computed or loaded before this step are there for certain.
        """
        if prompt.entry is None:
            return
        if prompt.entry.is_saved:
            self._copy(prompt, prompt.entry, num_before + num_new, is_final=is_final)
        else:
            self._force(prompt, prompt.entry, num_before, num_new)

    def finished(self, request: Request, prompt: Prompt | None) -> dict[str, Any] | None:
        """Ends the part of a finished request. Returns parameters for its response."""
        self._continuations.forget(request)
        entry = None if prompt is None else prompt.entry
        if prompt is None or entry is None:
            return None
        if entry.is_saved:
            return self._save(prompt, entry) if entry.is_copied else None
        self._loaded.discard(entry.handoff)
        # A cancelled load may have left the entry in the store.
        self.release(prompt)
        return None


def _given_tokens(params: SaveParams | LoadParams | ConsumeParams) -> tuple[int, ...]:
    """Returns the first tokens of the answer that a request brings."""
    if isinstance(params, ConsumeParams):
        return params.tokens
    return (params.first_token,) if isinstance(params, LoadParams) and params.first_token is not None else ()
