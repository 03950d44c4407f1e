"""Reports of one rank's loads to vLLM and to the scheduler role, each exactly once.

It knows neither vLLM nor the agent: the worker role passes on the events of the agent and the metadata of the steps.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvpipe.vllm.handoff.metadata import LoadOutcome, WorkerOutcomes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvpipe.vllm.handoff.metadata import Load, StepMetadata


@dataclass
class RankLoad:
    """A load of one rank, until its end is reported. Its blocks come from one rank of the producer, or from several.

    Attributes:
        load: The load's metadata.
        is_verified: True if all of its blocks were reported as verified: the scheduler role may commit it.
        is_answered: True if the scheduler role leaves the end of the load to the workers, and commits it no more.
        sources: For each rank of the producer from which it comes, the blocks that come from it.
        verified: Outcomes of those of which all blocks were verified.
        ended: Outcomes of those that have ended.
        missing: Blocks that some of these lack.
        end: Its outcome, and its missing blocks, while neither may be reported.
    """

    load: Load
    is_verified: bool
    is_answered: bool
    sources: Sequence[list[int]]
    verified: dict[int, LoadOutcome] = field(default_factory=dict)
    ended: dict[int, LoadOutcome] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    end: tuple[LoadOutcome, list[int]] | None = None


class RankLoads:
    """Loads of one rank.

    With asynchronous scheduling a request may run before its rank knows of the commit. So once a load was reported as
    verified, its end waits for the scheduler role's answer: `states`, `committed` or `cancels` of a step.

    Args:
        has_parts: True if vLLM goes on from the blocks before the first missing one. Otherwise it computes the whole
            prompt of a request that misses one.
    """

    def __init__(self, *, has_parts: bool = True) -> None:
        self._has_parts = has_parts
        self._failed: set[str] = set()
        self._loads: dict[bytes, RankLoad] = {}
        self._received: set[str] = set()
        self._invalid_block_ids: set[int] = set()
        self._outcomes: dict[str, LoadOutcome] = {}
        self._verified: dict[bytes, LoadOutcome] = {}
        self._acknowledged: list[bytes] = []
        self._broken: set[str] = set()

    def __contains__(self, handoff: bytes) -> bool:
        return handoff in self._loads

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, load: Load, sources: Sequence[list[int]] | None = None) -> None:
        """Adds a load. `sources` has the blocks from each rank of the producer; `None`: one rank has all of them."""
        sources = [load.block_ids] if sources is None else sources
        self._loads[load.handoff] = RankLoad(load, is_verified=False, is_answered=load.has_state, sources=sources)

    def refuse(self, load: Load, outcome: LoadOutcome) -> None:
        """Ends a load that cannot begin, without any block."""
        self._report_end(load, outcome, load.block_ids)

    def begin_step(self, step: StepMetadata) -> None:
        """Receives the scheduler role's answers. It reports the loads that it has committed itself."""
        self._acknowledged = step.committed
        for handoff in step.committed:
            self._loads.pop(handoff, None)
        for handoff in step.states:
            self._answer(handoff)
        for cancel in step.cancels:
            self._answer(cancel.handoff, is_withdrawn=cancel.is_withdrawn)

    def _answer(self, handoff: bytes, *, is_withdrawn: bool = False) -> None:
        if (found := self._loads.get(handoff)) is None:
            return
        found.is_answered = True
        if found.end is not None:
            outcome, missing = found.end
            self._end(found.load, outcome, found.load.block_ids if is_withdrawn else missing)

    def blocks_verified(self, handoff: bytes, outcome: LoadOutcome, source: int = 0) -> None:
        """All blocks of a load that come from a rank of the producer are here, and the sequence state is not."""
        if (found := self._loads.get(handoff)) is None:
            return
        found.verified[source] = outcome
        if len(found.verified) == len(found.sources) and not found.ended:
            self._verified[handoff] = _merged(found.verified)

    def ended(self, handoff: bytes, outcome: LoadOutcome, missing: Iterable[int], source: int = 0) -> bool:
        """The agent has ended what comes from a rank of the producer, without the blocks at these positions of it.

        Returns true if that is the first one that fails, of several: what comes from the others is of no use any more.
        """
        if (found := self._loads.get(handoff)) is None:
            return False
        is_first_failure = not outcome.is_loaded and all(each.is_loaded for each in found.ended.values())
        found.ended[source] = outcome
        found.missing.update(found.sources[source][position] for position in missing)
        if len(found.ended) < len(found.sources):
            return is_first_failure
        self._all_ended(found, _merged(found.ended))
        return False

    def _all_ended(self, found: RankLoad, outcome: LoadOutcome) -> None:
        wanted = found.load.block_ids
        block_ids = [block_id for block_id in wanted if block_id in found.missing]
        if len(found.sources) > 1:
            outcome.num_received, outcome.num_missing = len(wanted) - len(block_ids), len(block_ids)
        if found.is_verified and not found.is_answered:
            found.end = outcome, block_ids
            self._broken.add(found.load.request_id)
        else:
            self._end(found.load, outcome, block_ids)

    def _end(self, load: Load, outcome: LoadOutcome, missing: list[int]) -> None:
        del self._loads[load.handoff]
        self._verified.pop(load.handoff, None)
        self._report_end(load, outcome, missing)

    def _report_end(self, load: Load, outcome: LoadOutcome, missing: list[int]) -> None:
        if self._has_parts:
            self._invalid_block_ids.update(missing)
        elif missing or not outcome.is_loaded:
            self._failed.add(load.request_id)
        self._received.add(load.request_id)
        self._outcomes[load.request_id] = outcome

    def drain_received(self) -> set[str]:
        """Returns requests whose load has ended."""
        received, self._received = self._received, set()
        return received

    def drain_invalid_block_ids(self) -> set[int]:
        """Returns missing blocks of the loads that `drain_received` has just returned."""
        invalid, self._invalid_block_ids = self._invalid_block_ids, set()
        return invalid

    def drain_failed(self) -> set[str]:
        """Returns those of the requests that `drain_received` has just returned that vLLM has to compute anew."""
        failed, self._failed = self._failed, set()
        return failed

    def drain_outcomes(self) -> WorkerOutcomes | None:
        """Returns ended, verified and broken loads for the scheduler role; `None` if there is nothing to report.

        After a step without tokens, vLLM calls the scheduler role only if there is a report. So commits are always
        acknowledged, and each step of a load reports: its sequence state may have arrived meanwhile.
        """
        if not (self._loads or self._outcomes or self._acknowledged):
            return None
        report = WorkerOutcomes(self._outcomes, self._reported_verified(), self._acknowledged, self._broken)
        self._outcomes, self._acknowledged, self._broken = {}, [], set()
        return report

    def _reported_verified(self) -> dict[str, list[LoadOutcome]]:
        """Loads that lack the sequence state only, by request id; from now on the scheduler role may commit them."""
        verified: dict[str, list[LoadOutcome]] = {}
        for handoff, outcome in self._verified.items():
            self._loads[handoff].is_verified = True
            verified[self._loads[handoff].load.request_id] = [outcome]
        self._verified = {}
        return verified


def _merged(outcomes: Mapping[int, LoadOutcome]) -> LoadOutcome:
    return functools.reduce(LoadOutcome.merged, outcomes.values())
