"""`Primary`: the server of a store that is no cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvpipe.exceptions import PeerLostError
from kvpipe.store.valkey.errors import ELSEWHERE, NotNowError, NotServingError
from kvpipe.store.valkey.shared_call import SharedCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvpipe.exceptions import KVPipeError
    from kvpipe.store.valkey.connections import Connections, Greeting
    from kvpipe.store.valkey.settings import Address


class Primary:
    """The host of the URL that is a primary: the first one at opening, and whenever the last one does not serve.

    The host that does not serve is then the last one that is asked.

    Any thread may call.

    Attributes:
        address: Its host and port.
        capacity_bytes: Its `maxmemory`, if it has a limit.
        generation: Counts the changes.
        on_change: Called after each change.
    """

    def __init__(self, connections: Connections, hosts: tuple[Address, ...]) -> None:
        self._connections, self._hosts = connections, hosts
        self.address = hosts[0]
        self.capacity_bytes: int | None = None
        self.generation = 0
        self.on_change: Callable[[], None] = lambda: None
        self._finding: SharedCall[None] = SharedCall()

    def open(self, timeout_s: float) -> Greeting:
        """Finds it for the first time.

        Raises:
            LoginError: A host refuses the user or password.
            IncompatiblePeerError: A host is too old.
            PeerLostError: No host serves as a primary.
        """
        return self._first_of(self._hosts, timeout_s)

    def replace(self, error: KVPipeError, generation: int) -> None:
        """Finds it anew after `generation` did not serve. Calls share one search.

        Raises:
            LoginError: As `open`.
            PeerLostError: No host serves as a primary.
        """
        self._finding.run(lambda: self._replace(error, generation))

    def _replace(self, error: KVPipeError, generation: int) -> None:
        if generation != self.generation:
            return
        candidates = tuple(host for host in self._hosts if host != self.address)
        is_asked_again = isinstance(error, NotServingError) and not isinstance(error, NotNowError)
        if is_asked_again:
            # Its other connections answer the same. The name of one host may stand for another server now.
            self._connections.discard(self.address)
            candidates = (*candidates, self.address)
        if not candidates:
            raise error
        try:
            self._first_of(candidates, None)
        except ELSEWHERE:
            if isinstance(error, NotNowError):
                # It says more than that no other host is a primary.
                raise error from None
            raise
        self.generation += 1
        self.on_change()

    def _first_of(self, candidates: tuple[Address, ...], timeout_s: float | None) -> Greeting:
        last: KVPipeError = PeerLostError("the URL names no host")
        for server in candidates:
            try:
                greeting = self._connections.greet(server, timeout_s)
            except ELSEWHERE as error:
                last = error
            else:
                self.address, self.capacity_bytes = server, greeting.capacity_bytes
                return greeting
        raise last
