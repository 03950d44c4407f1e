"""The control plane at a fixed rate of handoffs, beside many peers and many handoffs under way."""

from __future__ import annotations

import itertools
import time
from statistics import quantiles
from typing import TYPE_CHECKING

from bench.scale.point import ReactorThread, wait
from kvpipe import _kvpipe

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.scale.point import Point

_LISTEN, _SILENCE_S = "127.0.0.1:0", 3600.0
_HASH, _RANKS = bytes(32), [("127.0.0.1:1", bytes(16))]
_FOR_S = 0.5
# How long handoffs that are late are waited for.
_DRAIN_S = 5.0
_ANSWER_WITHIN_S, _UNDER_WAY_S, _LOOK_EVERY_S = 10.0, 600.0, 100e-6


class ControlPlane:
    """A producer's and a consumer's control port, their other peers, and the handoffs that are under way on both."""

    def __init__(self, point: Point) -> None:
        self._numbers = itertools.count()
        self._num_watched = self._num_opened = 0
        self._asked: list[_kvpipe.Work] = []
        self._others = [_port() for _ in range(point.num_peers - 1)]
        self._producer_thread = ReactorThread.made_by(self._start_producer)
        self._consumer_thread = ReactorThread.made_by(self._start_consumer)
        for other in self._others:
            _connect(other, self._producer)
            _connect(self._consumer, other)
        for number in range(point.num_loads):
            self._under_way(number % point.num_peers)
        wait(self._are_opened)

    def _are_opened(self) -> bool:
        for port in (self._consumer, *self._others):
            self._num_opened += sum(event["event"] == "opened" for event in port.drain())
        return self._num_opened == self._num_watched

    def _start_producer(self) -> None:
        self._producer = _port()

    def _start_consumer(self) -> None:
        self._consumer = _port()

    def _under_way(self, place: int) -> None:
        """Opens, watches and subscribes to a handoff between the two ports, or one of each with another peer."""
        pairs = [(self._producer, self._consumer)]
        if place:
            other = self._others[place - 1]
            pairs = [(self._producer, other), (other, self._consumer)]
        for producer, consumer in pairs:
            handoff = self._handoff()
            producer.open(handoff, _HASH, 1, _RANKS)
            consumer.watch(handoff, producer.address or "")
            # As a proxy does that dispatches just in time.
            self._asked.append(consumer.ask_subscription(producer.address or "", handoff, 0, _UNDER_WAY_S))
            self._num_watched += 1

    def _handoff(self) -> bytes:
        return next(self._numbers).to_bytes(16)

    def at_rate(self, handoffs_per_s: int) -> dict[str, float]:
        """Offers handoffs at this rate, whatever becomes of them: watched, opened, finished, acknowledged."""
        threads = (self._producer_thread, self._consumer_thread)
        for thread in threads:
            thread.settle()
        before = [thread.cpu_s() for thread in threads]
        begun = time.monotonic()
        latencies = self._run(int(handoffs_per_s * _FOR_S), handoffs_per_s)
        took_s = time.monotonic() - begun
        producer_s, consumer_s = (thread.cpu_s() - cpu_s for thread, cpu_s in zip(threads, before, strict=True))
        cuts = quantiles(latencies, n=100, method="inclusive")
        return {
            "achieved": len(latencies) / took_s,
            "producer": 1e6 * producer_s / len(latencies),
            "consumer": 1e6 * consumer_s / len(latencies),
            "p50": 1e3 * cuts[49],
            "p90": 1e3 * cuts[89],
            "p99": 1e3 * cuts[98],
        }

    def _run(self, num_handoffs: int, handoffs_per_s: int) -> Sequence[float]:
        """Milliseconds from when each handoff was due to be offered until its producer may free its blocks."""
        due, latencies, num_offered = {}, [], 0
        begun = time.monotonic()
        while (now := time.monotonic() - begun) < num_handoffs / handoffs_per_s + _DRAIN_S:
            while num_offered < num_handoffs and num_offered <= now * handoffs_per_s:
                due[self._offer()] = num_offered / handoffs_per_s
                num_offered += 1
            for event in self._consumer.drain():
                if event["event"] == "finished":
                    self._consumer.unwatch(event["handoff"], is_acknowledged=True)
            released = [event for event in self._producer.drain() if event["event"] == "released"]
            now = time.monotonic() - begun
            latencies += [now - due.pop(event["handoff"]) for event in released]
            if len(latencies) == num_handoffs:
                break
            time.sleep(_LOOK_EVERY_S)
        return latencies

    def _offer(self) -> bytes:
        handoff = self._handoff()
        self._consumer.watch(handoff, self._producer.address or "")
        self._producer.open(handoff, _HASH, 1, _RANKS)
        self._producer.finish(handoff, [1], "length", 0, _HASH)
        return handoff

    def close(self) -> None:
        """Closes all ports."""
        for port in (self._consumer, self._producer, *self._others):
            port.close()


def _port() -> _kvpipe.Control:
    return _kvpipe.Control(_LISTEN, b"", silence=_SILENCE_S)


def _connect(client: _kvpipe.Control, server: _kvpipe.Control) -> None:
    described = client.ask_description(server.address or "", _ANSWER_WITHIN_S)
    wait(described.is_completed)
    described.result()
