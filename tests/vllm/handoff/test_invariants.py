"""Any order of requests, steps, aborts, failures and reports: vLLM's invariants hold, and all KV is its request's own.

A run is repeated by its seed, and longer runs are made by `KVPIPE_SEED=7 KVPIPE_EXAMPLES=2000`.
"""

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from vllm.v1.request import Request

from kvpipe.transfer_params import consume, produce, resume
from kvpipe.vllm.prompt_hash import prompt_hash
from tests.vllm.handoff.cache import FULL, Layers
from tests.vllm.handoff.engine import BLOCK, SAMPLING, engine_config
from tests.vllm.handoff.simulated_rank import Rank, Sizes, Transfer
from tests.vllm.handoff.world import THEIRS, Mode, World

pytestmark = pytest.mark.vllm

SEED = int(os.environ.get("KVPIPE_SEED", "11"))
NUM_EXAMPLES = int(os.environ.get("KVPIPE_EXAMPLES", "40"))
NUM_STEPS = 60
# Runs go on with the next seed until they have met all that is rare.
MOST_SEEDS = 20
MAX_LENGTH = 256
# Cases that the runs must have met for their silence to mean anything.
MUST_BE_SEEN = (
    "load",
    "load beyond the own cache",
    "load verified",
    "load without some blocks",
    "load without any block",
    "load cancelled",
    "load withdrawn by its producer",
    "load verified before its sequence state",
    "load withdrawn after it was verified",
    "load committed by the scheduler",
    "lease",
    "abort while a load runs",
    "abort while it waits for its producer",
    "abort of a prefill",
    "another prompt's handoff",
    "plain request preempted in decode",
    "producing request preempted in prefill",
    "consuming request preempted in prefill",
    "consuming request preempted in decode",
    "consumer validated its blocks",
    "consumer read changed blocks",
    "last block restored",
    "further token forced",
    "resumed request preempted between its tokens",
    "restored block announced for another request",
    "request continued",
    "continued request preempted before its second token",
)
WINDOW, CHUNK = Layers("window", 2 * BLOCK), Layers("chunk", 2 * BLOCK)
STATE, ALIGNED_STATE = Layers("state", block_size=MAX_LENGTH), Layers("state", block_size=BLOCK)
# KV cache groups of models.
MODELS = {
    "full": FULL,
    "window": (*FULL, WINDOW),
    "windows alone": (WINDOW,),
    "chunk": (*FULL, CHUNK),
    "state": (*FULL, STATE),
    "states at the ends of blocks": (*FULL, ALIGNED_STATE),
}
# Groups and sizes.
Variant = tuple[tuple[Layers, ...], Sizes]
# Engines of which one has more ranks. In the last of them, all ranks have copies of one head.
OTHER_SIZES: tuple[Variant, ...] = (
    *((FULL, Sizes(*sizes)) for sizes in [(1, 2, 2), (1, 4, 4), (2, 4, 4), (2, 1, 2)]),
    (MODELS["window"], Sizes(1, 2, 2)),
    (FULL, Sizes(2, 1, 1)),
)
# Cases that need them.
MUST_BE_SEEN_OF_OTHER_SIZES = (
    "load of several sources committed by the scheduler",
    "sequence state known with one source verified",
    "load of which one source failed and another was verified",
    "load withdrawn with one source verified",
    "source ended after the load was cancelled",
    "source failed after all were verified",
    "sources that lack different blocks",
    "shared blocks that one rank has and another reads",
    "lease of shared blocks ended when all ranks had them",
)
# Cases of models in which the last token of some prompts cannot be computed again.
MUST_BE_SEEN_OF_GROUPS = ("first token forced in place of a wrong one", "producer that sampled otherwise")
# A prefix is not cached, or shared only after the step in which its last token is replaced; or nothing is counted.
CANNOT_BE_SEEN = {
    (*FULL, STATE): {"load beyond the own cache", "restored block announced for another request"},
    (*FULL, ALIGNED_STATE): {"restored block announced for another request"},
    (WINDOW,): {"load beyond the own cache"},
}
MUST_BE_SEEN_AT_ONCE = ("two steps under way", "ranks apart", "acknowledged before the worker knows of the lease")

lengths = st.builds(
    lambda blocks, more: max(1, blocks * BLOCK + more), st.integers(0, 5), st.sampled_from([-1, 0, 1, 2, 7])
)
prompts = st.builds(
    lambda family, shared, length: prompt(family, min(shared, length), length),
    st.integers(0, 2),
    st.sampled_from([0, BLOCK, 3 * BLOCK, MAX_LENGTH]),
    lengths,
)
picks = st.integers(0, 1 << 16)
rarely = st.sampled_from([False] * 3 + [True])


def prompt(family: int, num_shared: int, length: int) -> list[int]:
    """A prompt whose first tokens are those of its family."""
    return [10 + family] * num_shared + [100 + family + length] * (length - num_shared)


@cache
def config(
    model: str, *, is_chunked: bool, is_cached: bool, is_continuing: bool, on_load_failure: str, has_states: bool
) -> Any:
    """vLLM's configuration; without chunks a step must hold the longest prompt."""
    arguments = {
        "max_model_len": MAX_LENGTH,
        "max_num_batched_tokens": 64 if is_chunked else MAX_LENGTH,
        "enable_chunked_prefill": is_chunked,
        "enable_prefix_caching": is_cached,
        "scheduler_reserve_full_isl": False,
    }
    if is_continuing:
        arguments["scheduler_cls"] = "kvpipe.connector.ContinuingScheduler"
    config = engine_config(model, arguments, on_load_failure=on_load_failure)
    # As vLLM does for a model with states: it caches them with the prefix.
    config.cache_config.mamba_cache_mode = "align" if has_states and is_cached else "none"
    return config


class Engines(RuleBasedStateMachine):
    """One engine that produces for others, consumes from others and serves plain requests."""

    model: ClassVar[str]
    is_async: ClassVar[bool]
    variants: ClassVar[Sequence[Variant]]
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        is_chunked=st.booleans(),
        is_cached=st.booleans(),
        is_continuing=st.booleans(),
        on_load_failure=st.sampled_from(["recompute", "fail"]),
        variant=picks,
        is_uniproc=st.booleans(),
        uses_v2=st.booleans(),
        is_late=st.booleans(),
    )
    def start(
        self,
        *,
        is_chunked: bool,
        is_cached: bool,
        is_continuing: bool,
        on_load_failure: str,
        variant: int,
        **modes: Any,
    ) -> None:
        groups, sizes = self.variants[variant % len(self.variants)]
        mode = Mode(is_async=self.is_async, groups=groups, sizes=sizes, **modes)
        # vLLM caches states at the ends of blocks only, and ends chunks of a prefill there.
        is_cached = groups[-1] == ALIGNED_STATE or (is_cached and groups[-1] != STATE)
        is_chunked |= groups[-1] == ALIGNED_STATE
        self.world = World(
            config(
                self.model,
                is_chunked=is_chunked,
                is_cached=is_cached,
                is_continuing=is_continuing,
                on_load_failure=on_load_failure,
                has_states=groups[-1].is_state,
            ),
            mode,
        )
        self.num_handoffs = 0

    def _handoff(self) -> str:
        self.num_handoffs += 1
        return f"{self.num_handoffs:032x}"

    # --- requests come and go

    @rule(tokens=prompts, max_tokens=st.sampled_from([1, 4, 40]))
    def a_plain_request_comes(self, tokens: list[int], max_tokens: int) -> None:
        self.world.add(tokens, max_tokens)

    @rule(tokens=prompts)
    def a_producing_request_comes(self, tokens: list[int]) -> None:
        self.world.add(tokens, 1, params=produce(self._handoff()))

    @rule(
        tokens=prompts,
        max_tokens=st.sampled_from([1, 4, 40]),
        given=st.sampled_from([(), (), (), (), (9,), tuple(range(9, 29))]),
        told=st.sampled_from(["nothing", "opened", "finished"]),
    )
    def a_consuming_request_comes(self, tokens: list[int], max_tokens: int, given: tuple[int, ...], told: str) -> None:
        handoff = self._handoff()
        if given:
            self.world.add(tokens, max_tokens, params=resume(handoff, given))
            return
        request = self.world.add(tokens, max_tokens, params=consume(handoff, "127.0.0.1:1"))
        if told != "nothing":
            self.world.wire.send_opened(bytes.fromhex(handoff), prompt_hash(request), len(tokens))
        if told == "finished":
            self._send_finished(bytes.fromhex(handoff))

    @precondition(lambda self: not self.world.transfers)
    @rule(tokens=prompts, is_one_late=st.booleans(), is_finished=st.booleans())
    def a_load_begins_before_its_producer_has_finished(
        self, tokens: list[int], *, is_one_late: bool, is_finished: bool
    ) -> None:
        """Its blocks arrive, or those of all sources but one. Then the producer may finish."""
        self.a_consuming_request_comes(tokens, 4, (), "opened")
        self._steps_until_known()
        for rank, transfer in self._incomplete()[is_one_late:]:
            rank.blocks_verified(transfer)
        self._steps_until_known()
        handoff = self.world.handoffs[self.world.requests[-1].request_id]
        if is_finished and handoff in self._opened():
            self._send_finished(handoff)

    @rule(family=st.integers(0, 2), num_blocks=st.integers(1, 4), is_meant=rarely)
    def a_prefill_shares_all_blocks_of_a_loaded_prompt(self, family: int, num_blocks: int, *, is_meant: bool) -> None:
        """vLLM shares the last block in the step that computes the loaded prompt's last token again."""
        if not is_meant:
            return
        tokens = prompt(family, num_blocks * BLOCK, num_blocks * BLOCK)
        if self._is_loaded(tokens):
            self.a_producing_request_comes([*tokens, 99])
            self.world.step()

    @rule(family=st.integers(0, 2), is_meant=rarely)
    def everything_is_preempted_during_the_first_step_of_a_loaded_prompt(self, family: int, *, is_meant: bool) -> None:
        if is_meant and self._is_loaded(prompt(family, 0, BLOCK + 7)):
            self.world.begin_step()
            self.everything_is_preempted()

    def _is_loaded(self, tokens: list[int]) -> bool:
        """Loads a prompt, and returns true if vLLM has been told so; it computes the last token in the next step."""
        self.a_consuming_request_comes(tokens, 4, (), "finished")
        self._steps_until_known()
        request = self.world.requests[-1]
        transfers = [(rank, transfer) for rank, transfer in self.world.transfers if transfer.request is request]
        if not transfers or any(transfer.has_ended for _, transfer in transfers):
            return False
        for rank, transfer in transfers:
            rank.end_transfer(transfer, [], is_loaded=True)
        self._steps_until_known()
        return True

    def _steps_until_known(self) -> None:
        """Steps until the workers know what the scheduler role knows, and it what they know."""
        for _ in range(2 if self.world.mode.is_async else 1):
            self.world.step()

    @precondition(lambda self: self.world.unfinished())
    @rule(pick=picks, is_meant=rarely)
    def a_client_leaves(self, pick: int, *, is_meant: bool) -> None:
        if not is_meant:
            return
        requests = self.world.unfinished()
        self._abort(requests[pick % len(requests)])

    @precondition(lambda self: self._prefilling())
    @rule(pick=picks)
    def a_client_leaves_during_prefill(self, pick: int) -> None:
        requests = self._prefilling()
        self._abort(requests[pick % len(requests)])

    def _prefilling(self) -> list[Request]:
        """Producing requests of which some chunks are computed."""
        return [
            request
            for request in self.world.unfinished()
            if request.num_computed_tokens and self.world.handoffs.get(request.request_id) in self.world.wire.produced
        ]

    def _abort(self, request: Request) -> None:
        self._count_abort(request)
        self.world.engine.abort(request)
        self.world.check()

    def _count_abort(self, request: Request) -> None:
        handoff = self.world.handoffs.get(request.request_id)
        if request.request_id in self.world.loads:
            self.world.seen["abort while a load runs"] += 1
        elif handoff in self._waiting():
            self.world.seen["abort while it waits for its producer"] += 1
        elif handoff in self.world.wire.produced and request.num_computed_tokens:
            self.world.seen["abort of a prefill"] += 1

    # --- other engines

    def _waiting(self) -> list[bytes]:
        """Handoffs whose producer has not opened them."""
        return [
            handoff
            for handoff, watched in self.world.wire.watched.items()
            if not (watched.is_opened or watched.is_over)
        ]

    def _opened(self) -> list[bytes]:
        """Handoffs whose producer computes."""
        return [
            handoff
            for handoff, watched in self.world.wire.watched.items()
            if watched.is_opened and not (watched.is_finished or watched.is_over)
        ]

    def _request_of(self, handoff: bytes) -> Request:
        return next(
            request for request in self.world.requests if self.world.handoffs.get(request.request_id) == handoff
        )

    @precondition(lambda self: self._waiting())
    @rule(pick=picks, is_other_prompt=rarely)
    def a_producer_opens(self, pick: int, *, is_other_prompt: bool) -> None:
        handoffs = self._waiting()
        handoff = handoffs[pick % len(handoffs)]
        request = self._request_of(handoff)
        self.world.seen["another prompt's handoff"] += is_other_prompt
        if is_other_prompt:
            self.world.foreign.add(handoff)
        hashed = bytes(32) if is_other_prompt else prompt_hash(request)
        self.world.wire.send_opened(handoff, hashed, request.num_prompt_tokens)

    @precondition(lambda self: self._opened())
    @rule(pick=picks, is_other_sampling=rarely)
    def a_producer_finishes(self, pick: int, *, is_other_sampling: bool) -> None:
        handoffs = self._opened()
        self.world.seen["producer that sampled otherwise"] += is_other_sampling
        self._send_finished(handoffs[pick % len(handoffs)], is_other_sampling=is_other_sampling)

    @precondition(lambda self: any(not watched.is_over for watched in self.world.wire.watched.values()))
    @rule(pick=picks, is_meant=rarely)
    def a_producer_is_lost(self, pick: int, *, is_meant: bool) -> None:
        if is_meant:
            watched = self.world.wire.watched
            handoffs = [handoff for handoff, watched in watched.items() if not watched.is_over]
            self.world.wire.send_ended(handoffs[pick % len(handoffs)])

    def _without_state(self) -> list[bytes]:
        """Handoffs that are loaded, and whose producer has not sampled."""
        loading = [sent.load.handoff for sent in self.world.loads.values() if not sent.load.refusal]
        watched = self.world.wire.watched
        return [it for it in loading if not (watched[it].is_over or watched[it].is_finished)]

    @precondition(lambda self: self._without_state())
    @rule(pick=picks, is_meant=rarely, is_withdrawn=st.booleans())
    def a_producer_is_lost_during_a_load(self, pick: int, *, is_meant: bool, is_withdrawn: bool) -> None:
        if is_meant:
            handoffs = self._without_state()
            self.world.wire.send_ended(handoffs[pick % len(handoffs)], is_withdrawn=is_withdrawn)

    def _partly_verified(self) -> list[bytes]:
        """Those of which a rank has all blocks from some ranks of the producer, and not from others."""
        ranks = self.world.ranks
        return [it for it in self._without_state() if any(rank.is_partly_verified(it) for rank in ranks)]

    @precondition(lambda self: self._partly_verified())
    @rule(pick=picks, is_meant=st.booleans())
    def a_producer_withdraws_a_load_that_is_partly_verified(self, pick: int, *, is_meant: bool) -> None:
        if is_meant:
            handoffs = self._partly_verified()
            self.world.wire.send_ended(handoffs[pick % len(handoffs)], is_withdrawn=True)
            self._steps_until_known()

    @precondition(lambda self: any(produced.state != "ended" for produced in self.world.wire.produced.values()))
    @rule(pick=picks)
    def a_handoff_is_acknowledged_or_released(self, pick: int) -> None:
        handoffs = [handoff for handoff, produced in self.world.wire.produced.items() if produced.state != "ended"]
        self.world.wire.release(handoffs[pick % len(handoffs)])

    @precondition(lambda self: self.world.exposed)
    @rule(pick=picks, num_pauses=st.sampled_from([0, 8]))
    def a_consumer_reads_without_checksums(self, pick: int, num_pauses: int) -> None:
        handoffs = [(rank, handoff) for rank in self.world.ranks for handoff in sorted(rank.exposed)]
        rank, handoff = handoffs[pick % len(handoffs)]
        rank.read_exposed(handoff, num_pauses)

    @precondition(lambda self: self._unread())
    @rule(pick=picks)
    def a_rank_of_a_consumer_has_all_blocks(self, pick: int) -> None:
        handoffs = self._unread()
        rank, handoff, number = handoffs[pick % len(handoffs)]
        rank.consumer_has_blocks(handoff, number)

    def _unread(self) -> list[tuple[Rank, bytes, int]]:
        """Handoffs whose consumer has the sequence state, and its ranks that may get all blocks."""
        produced = self.world.wire.produced
        return [
            (rank, handoff, number)
            for rank in self.world.ranks
            for handoff in sorted(rank.exposed)
            if produced[handoff].state == "finished"
            for number in rank.unread(handoff)
        ]

    # --- this engine's workers

    @precondition(lambda self: self._running())
    @rule(pick=picks, missing=st.sets(st.integers(0, 5)), is_verified=st.booleans())
    def a_load_ends(self, pick: int, missing: set[int], *, is_verified: bool) -> None:
        transfers = self._running()
        rank, transfer = transfers[pick % len(transfers)]
        num_blocks = len(transfer.load.block_ids)
        if transfer.is_withdrawn:
            rank.end_transfer(transfer, list(range(num_blocks)), is_loaded=False)
            return
        if transfer.is_committed and (is_verified or transfer.is_verified):
            rank.end_transfer(transfer, [], is_loaded=True)
            self.world.seen["load verified"] += 1
            return
        if transfer.is_verified:
            missing = set() if transfer.is_cancelled else set(range(num_blocks))
            self.world.seen["load withdrawn after it was verified"] += not transfer.is_cancelled
        kept = sorted(index for index in missing if index < num_blocks)
        rank.end_transfer(transfer, kept, is_loaded=False)
        self.world.seen["load cancelled"] += transfer.is_cancelled
        self.world.seen["load without some blocks"] += 0 < len(kept) < num_blocks
        self.world.seen["load without any block"] += len(kept) == num_blocks

    def _running(self) -> list[tuple[Rank, Transfer]]:
        return [(rank, transfer) for rank, transfer in self.world.transfers if not transfer.has_ended]

    @precondition(lambda self: self._incomplete())
    @rule(pick=picks)
    def all_blocks_of_a_load_arrive(self, pick: int) -> None:
        transfers = self._incomplete()
        rank, transfer = transfers[pick % len(transfers)]
        rank.blocks_verified(transfer)

    @precondition(lambda self: self._incomplete())
    @rule(pick=picks, is_at_once=st.booleans())
    def a_producer_finishes_after_its_blocks(self, pick: int, *, is_at_once: bool) -> None:
        transfers = self._incomplete()
        _, picked = transfers[pick % len(transfers)]
        for rank, transfer in transfers:
            if transfer.load is picked.load:
                rank.blocks_verified(transfer)
        if not is_at_once:
            self._steps_until_known()
        if picked.load.handoff in self._opened():
            self._send_finished(picked.load.handoff)

    def _send_finished(self, handoff: bytes, *, is_other_sampling: bool = False) -> None:
        if is_other_sampling:
            self.world.unforced.add(handoff)
        hashed = bytes(32) if is_other_sampling else SAMPLING.hash(self._request_of(handoff))
        self.world.wire.send_finished(handoff, [THEIRS], hashed)

    def _incomplete(self) -> list[tuple[Rank, Transfer]]:
        running = self._running()
        return [(rank, it) for rank, it in running if it.is_writing and not it.is_cancelled]

    @precondition(lambda self: any(rank.can_go_on() or rank.passes for rank in self.world.ranks))
    @rule(pick=picks, is_device=st.booleans())
    def a_rank_goes_on(self, pick: int, *, is_device: bool) -> None:
        """The host of a rank begins a step or reports on it, or its device runs a forward pass."""
        ranks = [rank for rank in self.world.ranks if (rank.passes if is_device else rank.can_go_on())]
        if ranks:
            rank = ranks[pick % len(ranks)]
            rank.run_pass() if is_device else rank.go_on()
            self.world.seen["ranks apart"] += len({len(rank.passes) for rank in self.world.ranks}) > 1

    # --- steps

    @rule(is_prompt=rarely)
    def a_step(self, *, is_prompt: bool) -> None:
        self.world.step(is_prompt=is_prompt)

    @rule()
    def a_step_begins(self) -> None:
        """The next rules come while the engine waits for the workers."""
        self.world.begin_step()

    @rule(count=st.integers(2, 12))
    def some_steps(self, count: int) -> None:
        for _ in range(count):
            self.world.step()

    @rule()
    def everything_is_preempted(self) -> None:
        # Requests that wait for their KV, or whose blocks are leased, keep them: vLLM raises after the preemption.
        with suppress(RuntimeError):
            self.world.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.world.check()

    # --- the end

    def teardown(self) -> None:
        """Whatever happened, what is left comes to its end by itself, and then nothing is held."""
        if not hasattr(self, "world"):
            return
        world = self.world
        for _ in range(5000):
            self._everybody_else_ends()
            if world.is_at_rest():
                world.drain()
                if world.is_at_rest():
                    break
            world.step()
        type(self).seen += world.seen
        world.check_rest()

    def _everybody_else_ends(self) -> None:
        wire = self.world.wire
        for handoff, watched in wire.watched.items():
            if not watched.is_over:
                wire.send_ended(handoff)
        for handoff, produced in wire.produced.items():
            if produced.state == "finished":
                wire.release(handoff)
        for rank, transfer in self._running():
            is_kept = transfer.is_verified and not transfer.is_withdrawn
            missing = range(len(transfer.load.block_ids)) if transfer.is_withdrawn else [0]
            rank.end_transfer(transfer, [] if is_kept else list(missing), is_loaded=False)


def _meets_all(wanted: Sequence[str]) -> None:
    """Runs the engines, with one seed after the other, until they have met these cases."""
    Engines.seen, unseen = Counter(), wanted
    for number in range(SEED, SEED + MOST_SEEDS):
        run_state_machine_as_test(
            seed(number)(Engines),
            settings=settings(
                max_examples=NUM_EXAMPLES,
                stateful_step_count=NUM_STEPS,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                phases=(Phase.generate, Phase.shrink),
            ),
        )
        unseen = [what for what in wanted if not Engines.seen[what]]
        if not unseen:
            return
    assert not unseen, f"{unseen} of {Engines.seen}"


in_both_depths = pytest.mark.parametrize("is_async", [False, True], ids=["one step at a time", "two steps at once"])


@in_both_depths
@pytest.mark.parametrize(
    "groups",
    [pytest.param(found, id=name, marks=() if found == FULL else pytest.mark.slow) for name, found in MODELS.items()],
)
def test_vllms_invariants_hold_in_any_order_of_events(
    tiny_model: str, groups: tuple[Layers, ...], *, is_async: bool
) -> None:
    Engines.model, Engines.is_async = tiny_model, is_async
    Engines.variants = [(groups, Sizes(number, number, number)) for number in (1, 2)]
    wanted = (*MUST_BE_SEEN, *(MUST_BE_SEEN_AT_ONCE if is_async else ()))
    wanted += () if groups == FULL else MUST_BE_SEEN_OF_GROUPS
    _meets_all([what for what in wanted if what not in CANNOT_BE_SEEN.get(groups, ())])


@in_both_depths
def test_they_hold_between_engines_of_other_tensor_parallel_sizes(tiny_model: str, *, is_async: bool) -> None:
    Engines.model, Engines.is_async, Engines.variants = tiny_model, is_async, OTHER_SIZES
    _meets_all(MUST_BE_SEEN_OF_OTHER_SIZES)
