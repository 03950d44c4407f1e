"""Questions to the store which chunks it has, asked by threads of the scheduler's process."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from kvpipe.store_connector.client import failure_reason
from kvpipe.store_connector.threads import TaskThreads

if TYPE_CHECKING:
    from kvpipe.store_connector.client import StoreClient

# A second one, so that a question that waits for a lost store does not hold up the next.
_NUM_THREADS = 2


class Answer(NamedTuple):
    """What the store said.

    Attributes:
        request_id: The request that was asked for.
        attempt: `Prompt.attempt` at that time.
        is_present: For each key whether it is there.
        failure: Kind of the failure; empty if the store has answered.
        elapsed_s: Seconds that it took.
    """

    request_id: str
    attempt: int
    is_present: tuple[bool, ...]
    failure: str
    elapsed_s: float


class Lookups:
    """Asks, and keeps the answers for the hooks. No method waits."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._threads = TaskThreads("kvpipe-lookup", _NUM_THREADS)
        self._answers: deque[Answer] = deque()

    def ask(self, request_id: str, attempt: int, keys: list[bytes]) -> None:
        """Asks which keys the store has, in one round trip."""
        self._threads.submit(lambda: self._ask(request_id, attempt, keys))

    def answers(self) -> list[Answer]:
        """Returns the answers that have come since the last call."""
        return [self._answers.popleft() for _ in range(len(self._answers))]

    def _ask(self, request_id: str, attempt: int, keys: list[bytes]) -> None:
        began_s = time.monotonic()
        is_present: tuple[bool, ...] = ()
        failure = ""
        try:
            is_present = self._client.run(lambda store: store.lookup(keys)).is_present
            if len(is_present) != len(keys):
                failure = "error"
        except Exception as error:  # noqa: BLE001 - a user's store may raise anything; the request is computed
            failure = failure_reason(error)
        self._answers.append(Answer(request_id, attempt, is_present, failure, time.monotonic() - began_s))

    def close(self, timeout: float) -> bool:
        """Returns whether the threads have ended in time."""
        return self._threads.close(timeout)
