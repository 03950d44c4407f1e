"""Wakes calls that wait for a value over TLS: one subscription of redis-py for all calls of a store."""

from __future__ import annotations

import logging
import os
import select
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any

from kvpipe.exceptions import ClosedError, KVPipeError, PeerLostError
from kvpipe.store.valkey.errors import translated
from kvpipe.store.valkey.wakeups import Waiter, Wakeups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpipe.store.valkey.client import Client

_log = logging.getLogger(__name__)
# The subscription ends this long after the last wait, so that waits in a row share it.
_LINGER_S = 2.0


class _Waiter(Waiter):
    """One call that waits for messages of a channel.

    Args:
        channel: Its name.
        subscribed: The channels whose messages arrive, as they are at each time.
    """

    def __init__(self, client: Client, channel: bytes, subscribed: set[bytes]) -> None:
        self._client, self._channel, self._subscribed = client, channel, subscribed
        self.error: KVPipeError | None = None
        self._changed = Event()

    def wake(self) -> None:
        """Ends `wait`."""
        self._changed.set()

    def begin(self) -> bool:
        """Begins an attempt; see `Waiter.begin`."""
        self._changed.clear()
        if self.error is not None:
            with self._client.counting_losses():
                raise self.error
        return self._channel in self._subscribed

    def wait(self, timeout: float | None) -> None:
        """Waits for a change."""
        self._changed.wait(timeout)


class LibraryWakeups(Wakeups):
    """The subscription of a store. Its thread and connection exist only while calls wait."""

    def __init__(self, client: Client) -> None:
        self._client, self._answer_s = client, client.settings.answer_s
        self._waiters: defaultdict[bytes, set[_Waiter]] = defaultdict(set)
        self._subscribed: set[bytes] = set()
        self._lock = Lock()
        self._thread: Thread | None = None
        self._notifier = -1
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Calls that wait."""
        with self._lock:
            return sum(map(len, self._waiters.values()))

    @contextmanager
    def listening(self, channel: bytes) -> Iterator[_Waiter]:
        """Subscribes to a channel."""
        waiter = _Waiter(self._client, channel, self._subscribed)
        with self._lock:
            if self._is_closed:
                raise ClosedError("the store was closed")
            self._waiters[channel].add(waiter)
            self._notify_or_start()
        try:
            yield waiter
        finally:
            with self._lock:
                self._waiters[channel].discard(waiter)
                if not self._waiters[channel]:
                    del self._waiters[channel]

    def close(self) -> None:
        """Ends all waits with `ClosedError`, and the thread."""
        with self._lock:
            self._is_closed = True
            self._fail(ClosedError("the store was closed"))
            thread = self._thread
            self._notify()
        if thread is not None:
            thread.join()

    # --- the lock is held

    def _notify(self) -> None:
        if self._notifier >= 0:
            os.eventfd_write(self._notifier, 1)

    def _notify_or_start(self) -> None:
        if self._thread is not None:
            self._notify()
            return
        self._notifier = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = Thread(target=self._run, name="kvpipe-valkey-wakeups", daemon=True)
        self._thread.start()

    def _fail(self, error: KVPipeError) -> None:
        for waiters in self._waiters.values():
            for waiter in waiters:
                waiter.error = error
                waiter.wake()

    # --- in the thread

    def _run(self) -> None:
        """Serves until nobody waits. A subscription that worked and is lost is made again; otherwise all calls fail."""
        while True:
            subscription: _Subscription | None = None
            try:
                connection = self._client.library_connection()
                try:
                    with translated("the server"):
                        subscription = _Subscription(connection, self._notifier, self._answer_s)
                        self._serve(subscription)
                finally:
                    with suppress(Exception):
                        connection.disconnect()
            except Exception as error:  # noqa: BLE001 - whatever it is, calls wait for this thread
                _log.debug("valkey.subscription_lost error=%s", error)
                with self._lock:
                    if self._is_closed or subscription is None or not subscription.has_received:
                        if not self._is_closed:
                            self._fail(_lost(error))
                        self._end()
                        return
                    self._subscribed.clear()
            else:
                return

    def _serve(self, subscription: _Subscription) -> None:
        idle_since_s: float | None = None
        while True:
            with self._lock:
                wanted = set(self._waiters)
                # Before the server receives it: a call for such a channel waits for its next answer from now on.
                self._subscribed &= wanted
                now_s = time.monotonic()
                idle_since_s = None if wanted else idle_since_s or now_s
                is_over = idle_since_s is not None and now_s - idle_since_s >= _LINGER_S
                if self._is_closed or is_over:
                    self._end()
                    return
            subscription.change(wanted)
            for kind, channel in subscription.messages(None if wanted else _LINGER_S):
                self._received(kind, channel)

    def _received(self, kind: bytes, channel: bytes) -> None:
        with self._lock:
            if kind == b"subscribe":
                self._subscribed.add(channel)
            for waiter in self._waiters.get(channel, ()):
                waiter.wake()

    def _end(self) -> None:
        self._subscribed.clear()
        os.close(self._notifier)
        self._notifier = -1
        self._thread = None


class _Subscription:
    """A connection that subscribes. One thread uses it."""

    def __init__(self, connection: Any, notifier: int, answer_s: float) -> None:
        self._connection, self._notifier, self._answer_s = connection, notifier, answer_s
        self._channels: set[bytes] = set()
        self._answer_due_s: float | None = None
        self.has_received = False
        self._poll = select.poll()
        # redis-py offers no descriptor, and one thread has to wait for messages and for new waiters.
        self._socket = connection._sock  # noqa: SLF001
        self._poll.register(self._socket.fileno(), select.POLLIN)
        self._poll.register(notifier, select.POLLIN)

    def change(self, wanted: set[bytes]) -> None:
        """Subscribes to what is wanted, and to nothing else."""
        if more := wanted - self._channels:
            self._send("SUBSCRIBE", *more)
        if fewer := self._channels - wanted:
            self._send("UNSUBSCRIBE", *fewer)
        self._channels = wanted

    def messages(self, timeout_s: float | None) -> Iterator[tuple[bytes, bytes]]:
        """Waits, and returns kind and channel of each message.

        Raises:
            PeerLostError: The server does not answer.
        """
        # A server that says nothing for so long is asked whether it is there.
        wait_s = self._answer_s if timeout_s is None else min(timeout_s, self._answer_s)
        if self._answer_due_s is not None:
            wait_s = max(0.0, min(wait_s, self._answer_due_s - time.monotonic()))
        ready = dict(self._poll.poll(wait_s * 1000))
        if self._notifier in ready:
            os.eventfd_read(self._notifier)
        while self._connection.can_read(timeout=0):
            kind, *rest = self._connection.read_response()
            self._answer_due_s = None
            self.has_received = True
            if rest:
                yield kind, rest[0]
        if not ready:
            self._check_or_ping()

    def _check_or_ping(self) -> None:
        if self._answer_due_s is None:
            self._send("PING")
        elif time.monotonic() >= self._answer_due_s:
            raise PeerLostError(f"the server did not answer for {self._answer_s:g} s")

    def _send(self, *command: str | bytes) -> None:
        self._connection.send_command(*command)
        if self._answer_due_s is None:
            self._answer_due_s = time.monotonic() + self._answer_s


def _lost(error: Exception) -> KVPipeError:
    """Returns what a call that waits raises."""
    return error if isinstance(error, KVPipeError) else PeerLostError(f"the subscription has failed: {error!r}")
