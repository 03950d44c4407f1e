"""Wakes calls that wait for a value: one subscription for all calls of a store."""

from __future__ import annotations

from contextlib import contextmanager
from threading import Lock
from typing import TYPE_CHECKING

from kvpipe.exceptions import ClosedError, PeerLostError
from kvpipe.store.valkey.errors import NotServingError, RefusedError, error_of
from kvpipe.store.valkey.shared_call import SharedCall

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvpipe import _kvpipe
    from kvpipe.store.valkey.client import Client


class Wakeups:
    """The subscription of a store: a connection that one of the waiting calls reads for all of them.

    It is kept for later waits. One that worked and is lost is made again; otherwise all calls that wait fail.
    """

    def __init__(self, client: Client) -> None:
        self.client = client
        self._subscription: _kvpipe.RespSubscription | None = None
        # Of the primary that it is at.
        self._generation = 0
        self._connecting: SharedCall[_kvpipe.RespSubscription] = SharedCall()
        self._num_waiting = 0
        # It is not held while a call connects.
        self._lock = Lock()
        self._is_closed = False
        client.primary.on_change = self._end_subscription

    @property
    def num_waiting(self) -> int:
        """Calls that wait."""
        return self._num_waiting

    @contextmanager
    def listening(self, channel: bytes) -> Iterator[Waiter]:
        """Subscribes to a channel."""
        waiter = Waiter(self, channel)
        with self._lock:
            self._num_waiting += 1
        try:
            yield waiter
        finally:
            with self._lock:
                self._num_waiting -= 1
            waiter.close()

    def subscription(self) -> _kvpipe.RespSubscription:
        """Returns the subscription, a new one where it has ended. Calls share one attempt to connect."""
        return self._current() or self._connecting.run(self._connect)

    def _current(self) -> _kvpipe.RespSubscription | None:
        with self._lock:
            self.check()
            is_replaced = self._generation != self.client.primary.generation
            has_ended = self._subscription is None or self._subscription.has_ended
            return None if has_ended or is_replaced else self._subscription

    def _connect(self) -> _kvpipe.RespSubscription:
        if (current := self._current()) is not None:
            return current
        client = self.client

        def subscribe() -> tuple[_kvpipe.RespSubscription, int]:
            generation = client.primary.generation
            return client.connections.subscribe(client.servers()), generation

        while True:
            subscription, generation = client.renewing(subscribe)
            with self._lock:
                if self._is_closed:
                    subscription.close()
                    return subscription
                # A change before this has closed the older subscription only; one after it closes this one.
                if generation == client.primary.generation:
                    if self._subscription is not None:
                        self._subscription.close()
                    self._subscription, self._generation = subscription, generation
                    return subscription
            subscription.close()

    def _end_subscription(self) -> None:
        """Ends the subscription at a server that is the primary no more; it may keep the connection."""
        with self._lock:
            if self._subscription is not None:
                self._subscription.close()

    def check(self) -> None:
        """Raises `ClosedError` if the store was closed."""
        if self._is_closed:
            raise ClosedError("the store was closed")

    def close(self) -> None:
        """Ends all waits with `ClosedError`, and the connection."""
        with self._lock:
            self._is_closed = True
            if self._subscription is not None:
                self._subscription.close()


class Waiter:
    """One call that waits for messages of a channel."""

    def __init__(self, wakeups: Wakeups, channel: bytes) -> None:
        self._wakeups, self._client, self._channel = wakeups, wakeups.client, channel
        with self._client.counting_losses():
            self._listen()

    def begin(self) -> bool:
        """Begins an attempt. Each change after it ends the next `wait`.

        Returns:
            Whether messages arrive: only then an attempt that fails may wait.

        Raises:
            ClosedError: The store was closed.
            PeerLostError: The server was lost.
            KVPipeError: The server refuses the subscription, for instance `AuthenticationError`.
        """
        with self._client.counting_losses():
            try:
                return self._waiter.begin()
            except (PeerLostError, RefusedError) as error:
                self._renew(error)
                return False

    def wait(self, timeout: float | None) -> None:
        """Waits for a change. Raises as `begin`."""
        with self._client.counting_losses():
            try:
                self._waiter.wait(timeout)
            except (PeerLostError, RefusedError) as error:
                self._renew(error)

    def close(self) -> None:
        """Ends the subscription to the channel, unless others listen too."""
        self._waiter.close()

    def _listen(self) -> None:
        while True:
            self._generation = self._client.primary.generation
            self._subscription = self._wakeups.subscription()
            try:
                self._waiter = self._subscription.listen(self._channel)
            except (PeerLostError, RefusedError) as error:
                self._check_can_renew(error)
            else:
                return

    def _renew(self, error: PeerLostError | RefusedError) -> None:
        self._check_can_renew(error)
        self._listen()

    def _check_can_renew(self, error: PeerLostError | RefusedError) -> None:
        """Raises the error unless it has ended a subscription that worked, or one at a server that was replaced."""
        self._wakeups.check()
        cause = error_of(str(error), self._client.address) if isinstance(error, RefusedError) else error
        has_worked = self._subscription.has_ended and self._subscription.has_received
        is_replaced = self._generation != self._client.primary.generation
        is_final = isinstance(error, RefusedError) and not isinstance(cause, NotServingError)
        if is_final or not (has_worked or is_replaced):
            raise cause from error
        if isinstance(cause, NotServingError):
            self._client.renew(cause, self._generation)
