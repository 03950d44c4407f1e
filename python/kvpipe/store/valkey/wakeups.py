"""Wakes calls that wait for a value: one subscription for all calls of a store."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from threading import Lock
from typing import TYPE_CHECKING

from kvpipe.exceptions import ClosedError, KVPipeError, PeerLostError
from kvpipe.store.valkey.errors import RefusedError, error_of

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
        self._connecting: Future[_kvpipe.RespSubscription] | None = None
        self._num_waiting = 0
        # It is not held while a call connects.
        self._lock = Lock()
        self._is_closed = False

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
        while True:
            with self._lock:
                self.check()
                if self._subscription is not None and not self._subscription.has_ended:
                    return self._subscription
                is_first = self._connecting is None
                connecting = self._connecting = self._connecting or Future()
            if is_first:
                return self._connect(connecting)
            # It is cancelled where the call that connects ends by the exception of a signal handler.
            with suppress(CancelledError):
                return connecting.result()

    def _connect(self, connecting: Future[_kvpipe.RespSubscription]) -> _kvpipe.RespSubscription:
        try:
            subscription = self.client.connections.subscribe(self.client.any_servers())
        except BaseException as error:
            with self._lock:
                self._connecting = None
            if isinstance(error, KVPipeError):
                connecting.set_exception(error)
            else:
                connecting.cancel()
            raise
        with self._lock:
            self._connecting, self._subscription = None, subscription
            if self._is_closed:
                subscription.close()
        connecting.set_result(subscription)
        return subscription

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
        self._wakeups, self._channel = wakeups, channel
        with self._translated():
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
        with self._translated():
            try:
                return self._waiter.begin()
            except PeerLostError as error:
                self._check_can_renew(error)
                self._listen()
                return False

    def wait(self, timeout: float | None) -> None:
        """Waits for a change. Raises as `begin`."""
        with self._translated():
            try:
                self._waiter.wait(timeout)
            except PeerLostError as error:
                self._check_can_renew(error)
                self._listen()

    def close(self) -> None:
        """Ends the subscription to the channel, unless others listen too."""
        self._waiter.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raises refusals of the server as errors of kvpipe, which do not renew the subscription; counts losses."""
        client = self._wakeups.client
        with client.counting_losses():
            try:
                yield
            except RefusedError as error:
                raise error_of(str(error), client.address) from error

    def _listen(self) -> None:
        while True:
            self._subscription = self._wakeups.subscription()
            try:
                self._waiter = self._subscription.listen(self._channel)
            except PeerLostError as error:
                self._check_can_renew(error)
            else:
                return

    def _check_can_renew(self, error: PeerLostError) -> None:
        """Raises the error unless it has ended a subscription that worked."""
        self._wakeups.check()
        if not (self._subscription.has_ended and self._subscription.has_received):
            raise error
