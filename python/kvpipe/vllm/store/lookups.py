"""Questions to the store which chunks it has, and for entries, asked by threads of the scheduler's process."""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from kvpipe.vllm.store.client import failure_reason
from kvpipe.vllm.store.threads import TaskThreads

if TYPE_CHECKING:
    from kvpipe.store.base import KVStore
    from kvpipe.vllm.store.client import StoreClient

# A second one, so that a question that waits for a lost store does not hold up the next.
_NUM_THREADS = 2
# For questions that wait until an entry is committed.
_NUM_WAITING_THREADS = 4


class Question(NamedTuple):
    """Lookup of one request in the store.

    Attributes:
        request_id: The request.
        attempt: `Prompt.attempt`.
        keys: The keys of its chunks.
        entry_keys: The keys of its entry, one for each rank; empty without one.
        until_s: Deadline of the wait for the entry, by `time.monotonic`; 0: no wait.
    """

    request_id: str
    attempt: int
    keys: list[bytes]
    entry_keys: list[bytes]
    until_s: float


class LookupAnswer(NamedTuple):
    """Answer of the store.

    Attributes:
        question: The lookup that it answers.
        is_present: For each key, true if it is there.
        records: The records of the entry; empty if it lacks one in time.
        failure: Kind of the failure; empty if the store has answered.
        elapsed_s: Seconds that it took, without the wait for the entry.
    """

    question: Question
    is_present: tuple[bool, ...] = ()
    records: tuple[bytes, ...] = ()
    failure: str = ""
    elapsed_s: float = 0.0


class Lookups:
    """Opens the store, asks, and keeps the answers for the hooks. No method waits."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._threads = TaskThreads("kvpipe-lookup", _NUM_THREADS)
        self._waiting = TaskThreads("kvpipe-entry", _NUM_WAITING_THREADS)
        self._answers: deque[LookupAnswer] = deque()
        self._threads.submit(client.open)

    def ask(self, question: Question) -> None:
        """Asks which keys the store has, in one round trip; before that for the entry, which is committed last."""
        threads = self._waiting if question.entry_keys else self._threads
        threads.submit(lambda: self._answers.append(self._answer(question)))

    def delete(self, keys: list[bytes]) -> None:
        """Deletes obsolete entries. Those that this does not reach expire."""
        self._threads.submit(lambda: self._delete(keys))

    def answers(self) -> list[LookupAnswer]:
        """Returns the answers that have come since the last call."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def _answer(self, question: Question) -> LookupAnswer:
        began_s = time.monotonic()
        try:
            records = self._client.run(lambda store: _records(store, question.entry_keys, question.until_s))
            began_s = time.monotonic()
            is_present = self._client.run(lambda store: store.lookup(question.keys).is_present) if question.keys else ()
            failure = "error" if len(is_present) != len(question.keys) else ""
        except Exception as error:  # noqa: BLE001 - a user's store may raise anything; the request is computed
            return LookupAnswer(question, failure=failure_reason(error), elapsed_s=time.monotonic() - began_s)
        return LookupAnswer(question, is_present, records, failure, time.monotonic() - began_s)

    def _delete(self, keys: list[bytes]) -> None:
        with suppress(Exception):  # as above
            self._client.run(lambda store: store.delete(keys))

    def close(self, timeout: float) -> bool:
        """Ends the threads. Returns true if they have ended in time."""
        return all([self._threads.close(timeout), self._waiting.close(timeout)])


def _records(store: KVStore, keys: list[bytes], until_s: float) -> tuple[bytes, ...]:
    """Waits for an entry of each rank, and returns their records; none if one has not come in time."""
    records = []
    for key in keys:
        value = store.select(key, timeout=max(0.0, until_s - time.monotonic()))
        if value is None:
            return ()
        with value:
            records.append(value.record)
    return tuple(records)
