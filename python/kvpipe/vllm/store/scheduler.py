"""The scheduler role: which chunks of a prompt the store has, whether they are loaded, and which are saved.

It runs on EngineCore's main thread. Threads ask the store; hooks post questions and collect answers.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from kvpipe._redaction import redact
from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import ConsumeParams, parse
from kvpipe.vllm.lora_adapters import Adapters
from kvpipe.vllm.model_files import NOT_COMPARED
from kvpipe.vllm.outbox import Outbox
from kvpipe.vllm.prefill_clock import PrefillClock
from kvpipe.vllm.scheduler_output import scheduled
from kvpipe.vllm.store.break_even import BreakEven
from kvpipe.vllm.store.circuit_breaker import Breaker
from kvpipe.vllm.store.client import StoreClient
from kvpipe.vllm.store.entries import Entries
from kvpipe.vllm.store.held_blocks import HeldBlocks
from kvpipe.vllm.store.keys import entry_id
from kvpipe.vllm.store.lookups import Lookups, Question
from kvpipe.vllm.store.metadata import Save, StoreLoad, StoreStepMetadata, WorkerReport
from kvpipe.vllm.store.names import Names
from kvpipe.vllm.store.prompts import Prompt
from kvpipe.vllm.store.stats import KVStoreStats

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvpipe.vllm.store.config import StoreConnectorConfig
    from kvpipe.vllm.store.entries import Entry
    from kvpipe.vllm.store.lookups import LookupAnswer

logger = init_logger("vllm.kvpipe.store")

_CLOSE_S = 2.0


class StoreSchedulerRole:
    """The prompts of one engine, on the side of its scheduler.

    Args:
        vllm_config: vLLM's configuration.
        config: Settings of the connector.

    Raises:
        ConfigError: The files of the model cannot be compared, or vLLM's block hashes can collide.
    """

    def __init__(self, vllm_config: VllmConfig, config: StoreConnectorConfig) -> None:
        self._config = config
        self._block_size = int(vllm_config.cache_config.block_size)
        self._chunk_blocks = config.chunk_size // self._block_size
        self._role = str(vllm_config.kv_transfer_config.kv_role)
        self._names = Names(vllm_config, config)
        self._is_speculative = vllm_config.speculative_config is not None
        self._are_forcing = True
        # Number of the latest reset, and whether the workers are to be asked which weights they have since.
        self._num_resets, self._is_reset = 0, False
        self._adapters = Adapters()
        self._client = StoreClient(config.store, config.lookup_timeout_s)
        self._lookups = Lookups(self._client)
        self._prompts: dict[str, Prompt] = {}
        self._breaker = Breaker()
        self._break_even = BreakEven(is_always=config.always_load, timeout_s=config.load_timeout_s)
        self._clock = PrefillClock()
        self._manager: KVCacheManager | None = None
        self._out = Outbox(StoreStepMetadata, KVStoreStats)
        is_async = vllm_config.device_config.device_type != "cpu"
        self._held = HeldBlocks(self._names.num_ranks, is_async=is_async)
        parts = (self._names, self._lookups, self._out, self._held)
        self._entries = Entries(vllm_config, *parts, chunk_blocks=self._chunk_blocks)
        logger.info(
            "store.start url=%s role=%s chunk_size=%d serde=%s ranks=%d",
            *(redact(config.store), self._role, config.chunk_size, config.serde, self._names.num_ranks),
        )

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Stores the manager, which knows the blocks of each request."""
        self._manager = manager
        self._entries.bind_kv_cache_manager(manager)
        self._held.bind_kv_cache_manager(manager)

    # --- requests

    def on_new_request(self, request: Request) -> None:
        """Asks the store what it has of a prompt."""
        num_chunks = request.num_prompt_tokens // self._config.chunk_size
        is_loadable = not (_is_handoff(request) or request.skip_reading_prefix_cache)
        if request.abort_immediately:
            return
        entry = self._entries.add(request)
        if not (num_chunks or entry):
            return
        if not (is_loadable or self._is_saving):
            self._add_without_kv(request, entry)
            return
        self._adapters.note(request)
        adapter = self._adapters.content(request)
        if reason := self._unnamed(request, adapter):
            self._out.stats.add("decisions", reason)
            self._add_without_kv(request, entry)
            return
        now_s = time.monotonic()
        chunk_ids = self._names.chunk_ids(request, num_chunks, adapter)
        prompt = Prompt(request, chunk_ids, adapter, is_loadable, now_s, entry)
        self._prompts[request.request_id] = prompt
        self._ask(prompt, now_s)

    def _unnamed(self, request: Request, adapter: str) -> str:
        """Returns the reason, for metrics, for which a prompt's KV has no shared name; empty if it has one."""
        if NOT_COMPARED in adapter:
            used = request.lora_request
            logger.warning_once(
                "store.unnamed requests with the LoRA adapter %s share no KV: %s; have its files on this disk, under "
                "another path for each version",
                *(used.lora_name, adapter),
            )
            return "adapter"
        return "multimodal" if request.mm_features and not self._names.are_features_named else ""

    def _add_without_kv(self, request: Request, entry: Entry | None) -> None:
        """Adds a request whose KV is neither loaded nor saved. Only tokens that it brings are of use."""
        if entry is None or not entry.given_tokens:
            self._entries.remove(request, entry)
        else:
            self._prompts[request.request_id] = Prompt(request, [], "", is_loadable=False, entry=entry, phase="done")

    @property
    def _is_saving(self) -> bool:
        return self._role != "kv_consumer"

    def _ask(self, prompt: Prompt, now_s: float) -> None:
        """Posts one question for all that a prompt needs, if the workers are known and the store is not broken."""
        prompt.asked_s, prompt.attempt = now_s, prompt.attempt + 1
        if not self._names.namespace:
            prompt.phase = "new"
        elif not (prompt.num_chunks or self._entries.is_to_ask(prompt)):
            prompt.phase = "done"
        elif not self._breaker.allows(now_s):
            self._compute(prompt, "breaker")
        else:
            prompt.phase = "asked"
            keys = self._names.keys(prompt.chunk_ids)
            entry_keys, until_s = self._entries.question(prompt, self._config.lookup_timeout_s, now_s)
            self._lookups.ask(Question(prompt.request.request_id, prompt.attempt, keys, entry_keys, until_s))

    def _compute(self, prompt: Prompt, reason: str) -> None:
        """Leaves a prompt to this engine."""
        prompt.phase = "done"
        self._entries.release(prompt)
        if prompt.is_loadable:
            self._out.stats.add("decisions", reason)

    def _receive(self, now_s: float) -> None:
        """Processes the store's answers, and gives up questions without one."""
        for answer in self._lookups.answers():
            self._answered(answer, now_s)

    def _answered(self, answer: LookupAnswer, now_s: float) -> None:
        self._out.stats.add("operations", "lookup")
        self._out.stats.add("seconds", "lookup", answer.elapsed_s)
        if answer.failure:
            self._failed(f"lookup: {answer.failure}", now_s)
        else:
            self._succeeded()
        prompt = self._prompts.get(answer.question.request_id)
        if prompt is not None and prompt.attempt != answer.question.attempt:
            prompt = None
        self._entries.answered(answer, prompt, now_s)
        if prompt is None:
            return
        if not answer.failure:
            prompt.answered(answer.is_present)
            if prompt.phase == "done":
                self._entries.release(prompt)
        elif prompt.phase == "asked":
            self._compute(prompt, "lookup_failed")

    def match(self, request: Request, num_local_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of tokens in the store beyond those here: `(None, False)` before it has answered."""
        # vLLM asks while it is not paused: an update of the weights, for which it was reset, is over.
        if self._is_reset:
            self._is_reset, self._out.step.identification = False, self._num_resets
        prompt = self._prompts.get(request.request_id)
        if prompt is None or not prompt.is_loadable:
            return 0, False
        now_s = time.monotonic()
        self._receive(now_s)
        if request.num_preemptions != prompt.num_preemptions:
            prompt.num_preemptions, prompt.decision = request.num_preemptions, None
            if prompt.entry is not None:
                prompt.entry.num_computed = 0
            self._ask(prompt, now_s)
        if prompt.phase in ("new", "asked"):
            if now_s < prompt.asked_s + self._config.lookup_timeout_s:
                return None, False
            self._give_up_lookup(prompt, now_s)
        if prompt.phase != "answered":
            return 0, False
        return self._claim(prompt, num_local_tokens, now_s)

    def _give_up_lookup(self, prompt: Prompt, now_s: float) -> None:
        if prompt.phase == "asked":
            self._failed("lookup: timeout", now_s)
        self._compute(prompt, "lookup_timeout")

    def _claim(self, prompt: Prompt, num_local_tokens: int, now_s: float) -> tuple[int, bool]:
        """Claims the longest stored prefix. vLLM may ask again in each step, so the decision is kept."""
        num_stored = prompt.num_stored_tokens(self._config.chunk_size)
        wanted = num_stored - num_local_tokens
        # vLLM can compute the last token of a prompt itself; alone it is not worth a load.
        if wanted <= 1:
            self._compute(prompt, "local" if num_stored else "none")
            return 0, False
        if prompt.decision is None:
            num_chunks = prompt.num_matched + prompt.is_stored_to_end - num_local_tokens // self._config.chunk_size
            speed = self._clock.tokens_per_s
            prompt.decision = self._break_even.decide(wanted, num_chunks, speed, now_s)
            self._out.stats.add("decisions", prompt.decision.reason)
        if not prompt.decision.is_load:
            prompt.phase = "done"
            self._entries.release(prompt)
            return 0, False
        if not prompt.is_stored_to_end:
            self._entries.release(prompt)
        prompt.num_local_tokens = num_local_tokens
        return wanted, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Begins the load into newly allocated blocks."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None or prompt.phase != "answered":
            return
        if not num_external_tokens:
            # The scheduler, or another connector of a MultiConnector, has decided otherwise.
            prompt.phase = "done"
            self._entries.release(prompt)
            return
        first = prompt.num_local_tokens // self._block_size
        end = -(-(prompt.num_local_tokens + num_external_tokens) // self._block_size)
        block_ids = list(blocks.get_block_ids()[0][first:end])
        first_chunk = prompt.num_local_tokens // self._config.chunk_size
        prompt.phase, prompt.load_began_s, prompt.outcome = "loading", time.monotonic(), None
        if prompt.num_local_tokens + num_external_tokens == request.num_prompt_tokens:
            prompt.last_block_id = block_ids[-1]
        entry = prompt.entry if prompt.is_stored_to_end else None
        load = StoreLoad(
            request_id=request.request_id,
            chunk_ids=prompt.chunk_ids[first_chunk : prompt.num_matched],
            first=first - first_chunk * self._chunk_blocks,
            block_ids=block_ids,
            limit_s=prompt.decision.limit_s if prompt.decision else self._config.load_timeout_s,
            entry_id=b"" if entry is None else entry_id(entry.handoff),
            record=b"" if entry is None else entry.record,
        )
        prompt.num_loading = len(load.part_ids)
        self._out.step.loads.append(load)

    def finished(self, request: Request) -> dict[str, Any] | None:
        """Forgets a finished request, and returns parameters for its response.

        A load of an aborted one is cancelled; vLLM waits for its end.
        """
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is not None and prompt.phase == "loading":
            self._out.step.cancels.append(request.request_id)
        return self._entries.finished(request, prompt)

    # --- every step

    def build_metadata(self, output: SchedulerOutput) -> StoreStepMetadata:
        """Returns the worker role's tasks of this step."""
        now_s = time.monotonic()
        self._receive(now_s)
        self._clock.scheduled(output.total_num_scheduled_tokens, now_s)
        for request_id, num_before, num_new in scheduled(output):
            prompt = self._prompts.get(request_id)
            if prompt is not None:
                self._restore(prompt, num_before, num_new)
                self._save(prompt, output, num_before + num_new)
                self._entries.scheduled(prompt, num_before, num_new, is_final=not output.has_sync_kv_loads)
        step = self._out.drain_step()
        step.namespace = self._names.namespace
        return step

    def _restore(self, prompt: Prompt, num_before: int, num_new: int) -> None:
        """Has the workers restore a loaded prompt's last block in its first step, if that computes one token."""
        block_id, prompt.last_block_id = prompt.last_block_id, None
        is_last_token = (num_before, num_new) == (prompt.request.num_prompt_tokens - 1, 1)
        # A draft model writes into that block, too.
        if block_id is not None and is_last_token and not self._is_speculative:
            self._out.step.restores.append(block_id)

    def _save(self, prompt: Prompt, output: SchedulerOutput, num_tokens: int) -> None:
        """Has the workers save the chunks of a prompt that are complete after this step.

        What another connector loads within a step may turn out to be missing at its end. Such a step saves nothing;
        the next one does, when vLLM has corrected how much is computed.
        """
        if not (self._is_saving and self._names.namespace) or self._manager is None or output.has_sync_kv_loads:
            return
        chunks = prompt.complete_chunks(num_tokens, self._config.chunk_size)
        if not chunks:
            return
        block_ids = self._manager.get_block_ids(prompt.request.request_id)[0]
        for index in chunks:
            first = index * self._chunk_blocks
            saved = list(block_ids[first : first + self._chunk_blocks])
            self._out.step.saves.append(Save(prompt.chunk_ids[index], saved, self._held.hold(saved)))

    def update(self, output: KVConnectorOutput) -> None:
        """Processes the worker role's report on the step that has ended."""
        now_s = time.monotonic()
        self._clock.ended(now_s)
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._introduced(report, now_s)
            self._held.copied(report.copied)
            for request_id, outcome in report.outcomes.items():
                if (prompt := self._prompts.get(request_id)) is not None:
                    prompt.outcome = outcome if prompt.outcome is None else prompt.outcome.merged(outcome)
        for request_id in output.finished_recving or ():
            prompt = self._prompts.get(request_id)
            if prompt is not None and prompt.phase == "loading":
                self._load_ended(prompt, now_s)

    def _introduced(self, report: WorkerReport, now_s: float) -> None:
        """Asks for the prompts that have waited, once all workers have reported their additions to the fingerprint."""
        self._are_forcing = self._are_forcing and not report.unforced
        # Reports from before the latest reset are outdated.
        if report.identification != self._num_resets or not self._names.introduce(report.properties):
            return
        self._out.stats.set_namespace(self._names.namespace, is_shared=self._names.is_shared)
        if self._names.is_shared:
            logger.info("store.namespace namespace=%s", self._names.namespace.hex())
        else:
            logger.warning("store.private this instance shares no KV: %s", self._names.private_reason)
        self._entries.support.are_workers_ready = self._are_forcing
        self._out.stats.set_forcing(is_forcing=self._entries.support.is_supported())
        for prompt in self._prompts.values():
            if prompt.phase == "new":
                self._ask(prompt, now_s)

    def _load_ended(self, prompt: Prompt, now_s: float) -> None:
        first_chunk = prompt.num_local_tokens // self._config.chunk_size
        num_wanted = prompt.num_loading
        num_loaded, reason = prompt.load_ended(first_chunk)
        self._entries.loaded(prompt, is_complete=num_loaded == num_wanted)
        elapsed_s = now_s - prompt.load_began_s
        self._break_even.loaded(num_loaded, elapsed_s)
        self._out.stats.add("operations", "load")
        self._out.stats.add("seconds", "load", elapsed_s)
        self._out.stats.add("loaded", "none", num_loaded)
        self._out.stats.add("missed", reason, num_wanted - num_loaded)
        if reason in ("timeout", "lost", "error"):
            self._failed(f"load: {reason}", now_s)
        else:
            self._succeeded()

    def _failed(self, what: str, now_s: float) -> None:
        before = self._breaker.state
        self._breaker.failed(now_s)
        self._note_breaker(before, what)

    def _succeeded(self) -> None:
        before = self._breaker.state
        self._breaker.succeeded()
        self._note_breaker(before, "it answers again")

    def _note_breaker(self, before: str, what: str) -> None:
        state = self._breaker.state
        if state != before:
            self._out.stats.set_breaker("load", state)
        if "closed" in (state, before) and state != before:
            logger.warning("store.breaker loads are %s: %s", "used again" if state == "closed" else "not tried", what)

    def drain_stats(self) -> KVStoreStats | None:
        """Returns the counts since the last call; `None` if there are none."""
        return self._out.drain_stats()

    @property
    def holds_blocks(self) -> bool:
        """True if workers copy blocks that vLLM must not give to others."""
        return len(self._held) > 0

    def reset(self) -> None:
        """Uses nothing that is stored before the workers have said which weights they have now: they may be others."""
        for prompt in self._prompts.values():
            self._entries.forget(prompt)
        if self._names.namespace:
            self._out.stats.set_namespace(self._names.namespace, is_shared=False)
        # vLLM does not empty it while requests have blocks, unless it may preempt them. Their first block may not be
        # full yet: it gets its hash later, with KV of both weights. One block, the null block, is always in use.
        pool = None if self._manager is None else self._manager.block_pool
        is_cache_empty = (
            pool is not None
            and pool.num_gpu_blocks - pool.get_num_free_blocks() == 1
            and not len(pool.cached_block_hash_to_block)
        )
        self._names.reset(is_cache_empty=is_cache_empty)
        self._num_resets, self._is_reset = self._num_resets + 1, True
        now_s = time.monotonic()
        for prompt in self._prompts.values():
            prompt.is_stored = [False] * prompt.num_chunks
            # KV that was computed with other weights is not saved, nor the KV after it.
            prompt.next_chunk = prompt.num_chunks if prompt.request.num_computed_tokens else 0
            if prompt.phase in ("asked", "answered"):
                self._ask(prompt, now_s)

    def close(self) -> None:
        """Ends the threads and the store."""
        are_ended = self._lookups.close(0.0)
        self._client.close()
        if not are_ended and not self._lookups.close(_CLOSE_S):
            logger.warning("store.threads_left a call of the store has not ended within %s s", _CLOSE_S)


def _is_handoff(request: Request) -> bool:
    """True if KVPipeConnector loads a request's KV from its producer."""
    try:
        params = parse(request.kv_transfer_params)
    except ConfigError:
        return False
    return isinstance(params, ConsumeParams) and bool(params.producer)
