"""State of the requests that have chunks, entries or first tokens, as the scheduler role keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.vllm.store.break_even import Decision
    from kvpipe.vllm.store.entries import Entry
    from kvpipe.vllm.store.metadata import StoreLoadOutcome


@dataclass
class Prompt:
    """A request with one full chunk at least, with a handoff through the store, or with a first token.

    `phase`: `new` (the workers have not reported yet) → `asked` (a lookup is under way) → `answered` → `loading` →
    `done`; `done` also from any of the first three. In `done` this engine computes what it does not have.

    Attributes:
        request: vLLM's request.
        chunk_ids: Ids of the prompt's full chunks.
        adapter: Content of its LoRA adapter; empty without one.
        is_loadable: True if its KV may be loaded from the store.
        entry: Its entry; `None` without a handoff through the store.
        asked_s: Time at which the store was asked, or was to be.
        attempt: Number of the latest question, posted or not; answers to earlier ones do not count.
        is_stored: For each chunk, true if every rank's part is in the store; false where that is not known.
        decision: Decision to load or to compute stored chunks; `None` before it.
        num_local_tokens: Tokens found in this engine's prefix cache when the load was claimed.
        load_began_s: Start time of the load.
        num_loading: Chunks that it loads; an entry counts as one.
        outcome: The ranks' merged outcome of the load.
        last_block_id: The prompt's last block, from the start of a load that ends with the prompt until a step computes
            in it.
        next_chunk: First chunk that has been neither saved nor left out.
        num_preemptions: Preemptions that this object has processed.
    """

    request: Request
    chunk_ids: list[bytes]
    adapter: str
    is_loadable: bool
    asked_s: float = 0.0
    entry: Entry | None = None
    phase: str = "new"
    attempt: int = 0
    is_stored: list[bool] = field(default_factory=list)
    decision: Decision | None = None
    num_local_tokens: int = 0
    load_began_s: float = 0.0
    num_loading: int = 0
    outcome: StoreLoadOutcome | None = None
    last_block_id: int | None = None
    next_chunk: int = 0
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.is_stored = [False] * self.num_chunks

    @property
    def num_chunks(self) -> int:
        """Full chunks of the prompt."""
        return len(self.chunk_ids)

    @property
    def num_matched(self) -> int:
        """Chunks of the longest prefix that is stored."""
        return next((index for index, is_stored in enumerate(self.is_stored) if not is_stored), self.num_chunks)

    def num_stored_tokens(self, chunk_size: int) -> int:
        """Returns the number of prompt tokens in the store: those of full chunks, or all with its entry."""
        if self.is_stored_to_end:
            return int(self.request.num_prompt_tokens)
        return self.num_matched * chunk_size

    @property
    def is_stored_to_end(self) -> bool:
        """True if the store has all chunks and the entry."""
        is_found = self.entry is not None and self.entry.is_found
        return is_found and self.num_matched == self.num_chunks

    def answered(self, is_present: tuple[bool, ...]) -> None:
        """Notes the store's answer. One that comes too late for a load still names the chunks that need no save.

        Args:
            is_present: For each rank, and in it for each chunk, true if it is there.
        """
        self.is_stored = [all(is_present[index :: self.num_chunks]) for index in range(self.num_chunks)]
        if self.phase == "asked":
            self.phase = "answered"

    def complete_chunks(self, num_tokens: int, chunk_size: int) -> list[int]:
        """Returns the chunks that are complete with `num_tokens` and not stored, each once."""
        end = min(self.num_chunks, num_tokens // chunk_size)
        first, self.next_chunk = self.next_chunk, max(self.next_chunk, end)
        return [index for index in range(first, end) if not self.is_stored[index]]

    def load_ended(self, first_chunk: int) -> tuple[int, str]:
        """Notes the end of the load: `(chunks loaded, reason of the others)`. A chunk that failed is saved again."""
        self.phase = "done"
        outcome, self.outcome = self.outcome, None
        if outcome is None:
            return 0, "error"
        if outcome.num_loaded < self.num_loading:
            self.last_block_id = None
            # After the last chunk comes the entry, which is not saved again.
            if (failed := first_chunk + outcome.num_loaded) < self.num_chunks:
                self.is_stored[failed] = False
        return outcome.num_loaded, outcome.reason
