"""Keeps values open at the server while their holder lives."""

from __future__ import annotations

import logging
from threading import Condition, Thread
from typing import TYPE_CHECKING
from weakref import WeakSet

from kvpipe.exceptions import KVPipeError

if TYPE_CHECKING:
    from kvpipe.store.valkey.values import ValkeyValue

_log = logging.getLogger(__name__)


class PinRenewer:
    """Renews the pins of open values, in a thread that exists while there are some.

    Args:
        pin_s: Seconds after which the server forgets a pin.
    """

    def __init__(self, pin_s: float) -> None:
        self._period_s = pin_s / 3
        # A value that its caller has lost is not renewed, so that it can be taken after `pin_s`.
        self._values: WeakSet[ValkeyValue] = WeakSet()
        self._changed = Condition()
        self._thread: Thread | None = None
        self._is_closed = False

    def add(self, value: ValkeyValue) -> None:
        """Begins to renew a pin."""
        with self._changed:
            self._values.add(value)
            if self._thread is None and not self._is_closed:
                self._thread = Thread(target=self._run, name="kvpipe-valkey-pins", daemon=True)
                self._thread.start()

    def remove(self, value: ValkeyValue) -> None:
        """Ends to renew a pin."""
        with self._changed:
            self._values.discard(value)

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, self._period_s)
                values = list(self._values)
                if self._is_closed or not values:
                    self._thread = None
                    return
            for value in values:
                try:
                    value.pin()
                except KVPipeError as error:
                    _log.warning("valkey.pin_failed key=%s error=%s", value.key.hex(), error)
                    break
            del values
