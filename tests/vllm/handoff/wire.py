"""A scripted control plane: records the scheduler role's commands, and sends the events that a test chooses.

It replaces the thread and the network behind `_kvpipe.Control`, so that a random run can be repeated. It sends only
events that this thread can send (docs/concepts/failure.md has its states). `test_scheduler.py` and the tests of the
core check the thread itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class Produced:
    """A handoff that this engine produces: `expected`, `open`, `finished` or `ended`."""

    state: str = "expected"
    output_ids: Sequence[int] = ()


@dataclass
class Watched:
    """A handoff of another engine, with the events sent for it."""

    is_opened: bool = False
    is_finished: bool = False
    is_ended: bool = False
    is_over: bool = False
    is_unwatched: bool = False
    is_acknowledged: bool = False


class Wire:
    """Replaces `_kvpipe.Control`. Other engines have so many ranks."""

    address = "127.0.0.1:0"

    def __init__(self, num_ranks: int = 1) -> None:
        self._num_ranks = num_ranks
        self.produced: dict[bytes, Produced] = {}
        self.watched: dict[bytes, Watched] = {}
        self.results: dict[bytes, list[str]] = {}
        self._events: list[dict[str, Any]] = []

    def drain(self) -> list[dict[str, Any]]:
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Nothing to end."""

    # --- this engine produces

    def expect(self, handoff: bytes) -> None:
        self.produced[handoff] = Produced()

    def open(
        self, handoff: bytes, prompt_hash: bytes, num_tokens: int, ranks: Any, adapter: str, *, stages: Any
    ) -> None:
        produced = self.produced[handoff]
        assert produced.state in ("expected", "ended"), "a handoff is opened once"
        if produced.state == "ended":
            self._send_released(handoff)
        else:
            produced.state = "open"

    def progress(self, handoff: bytes, remaining: float) -> None:
        assert remaining >= 0

    def finish(
        self,
        handoff: bytes,
        output_ids: Sequence[int],
        finish_reason: str,
        num_cached_tokens: int,
        sampling_hash: bytes,
    ) -> None:
        produced = self.produced[handoff]
        assert produced.state in ("open", "ended"), "a handoff that is not open cannot finish"
        assert len(output_ids) == 1
        if produced.state == "ended":
            self._send_released(handoff)
        else:
            produced.state, produced.output_ids = "finished", output_ids

    def withdraw(self, handoff: bytes, reason: str) -> None:
        self.produced.setdefault(handoff, Produced()).state = "ended"

    def release(self, handoff: bytes) -> None:
        """Ends a handoff: it was acknowledged or released, its lease ended, or its consumer died."""
        produced = self.produced[handoff]
        if produced.state in ("open", "finished"):
            self._send_released(handoff)
        produced.state = "ended"

    def _send_released(self, handoff: bytes) -> None:
        self._events.append({"event": "released", "handoff": handoff, "reason": "it was released"})

    # --- this engine consumes

    def watch(self, handoff: bytes, producer: str) -> None:
        assert handoff not in self.watched, "a handoff is watched once"
        self.watched[handoff] = Watched()

    def unwatch(self, handoff: bytes, is_acknowledged: bool) -> None:  # noqa: FBT001 - the native method's
        watched = self.watched[handoff]
        assert not watched.is_unwatched, "a producer is told once"
        assert not is_acknowledged or watched.is_finished, "only a verified load is acknowledged"
        watched.is_over, watched.is_unwatched, watched.is_acknowledged = True, True, is_acknowledged

    def set_result(self, handoff: bytes, json: str) -> None:
        self.results.setdefault(handoff, []).append(json)

    def send_opened(self, handoff: bytes, prompt_hash: bytes, num_tokens: int) -> None:
        """The producer has scheduled its request."""
        self.watched[handoff].is_opened = True
        self._send(
            handoff,
            "opened",
            prompt_hash=prompt_hash,
            num_tokens=num_tokens,
            adapter="",
            ranks=[(f"127.0.0.1:{rank + 1}", bytes(16)) for rank in range(self._num_ranks)],
            stages=[],
        )

    def send_finished(self, handoff: bytes, output_ids: list[int], sampling_hash: bytes) -> None:
        """The producer has sampled its token."""
        self.watched[handoff].is_finished = True
        self._send(
            handoff,
            "finished",
            output_ids=output_ids,
            finish_reason="length",
            num_cached_tokens=0,
            sampling_hash=sampling_hash,
        )

    def send_ended(self, handoff: bytes, *, is_withdrawn: bool = False) -> None:
        """The producer died, was late, or has withdrawn its blocks."""
        self.watched[handoff].is_ended = self.watched[handoff].is_over = True
        self._send(handoff, "ended", reason="it has ended", cause="ended", is_withdrawn=is_withdrawn)

    def _send(self, handoff: bytes, event: str, **fields: Any) -> None:
        self._events.append({"event": event, "handoff": handoff, **fields})
