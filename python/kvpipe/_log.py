"""The thread that hands to Python's `logging` what the native part logs, under `kvpipe.*`."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading

from kvpipe import _kvpipe

_LOGGER = logging.getLogger("kvpipe")
# A filter or a handler that blocks keeps the interpreter from exiting for this long at most.
_END_WITHIN_S = 1.0


def begin() -> None:
    """Starts the thread, in a process without one. The native part calls this for each pipe, agent, buffer and port."""
    global _forwarder  # noqa: PLW0603 - one for each process
    descriptor = _kvpipe.begin_log(_LOGGER.getEffectiveLevel())
    if descriptor is not None:
        _forwarder = _Forwarder(descriptor)
        with contextlib.suppress(RuntimeError):  # the interpreter is exiting, and will call `_end`
            _forwarder.start()


def forward() -> None:
    """Logs what is queued."""
    records, num_lost = _kvpipe.drain_log(_LOGGER.getEffectiveLevel())
    if num_lost:
        records.append((logging.WARNING, _LOGGER.name, f"log.overflow num_lost={num_lost}"))
    for level, name, text in records:
        try:
            logging.getLogger(name).log(level, "%s", text)
        except Exception:  # noqa: BLE001 - of a filter or a handler of the user's; the next record may pass
            sys.excepthook(*sys.exc_info())


class _Forwarder(threading.Thread):
    """Sleeps until something is queued. A forked child has none, until its own first pipe or agent."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(name="kvpipe-log", daemon=True)
        self._descriptor = descriptor
        self._is_ending = False

    def run(self) -> None:
        while not self._is_ending:
            os.read(self._descriptor, 8)  # as `eventfd_read`, which a signal interrupts
            forward()

    def end(self) -> None:
        """Ends the thread."""
        if self.is_alive():  # and not that of a forked child's parent, whose descriptor may be another's by now
            self._is_ending = True
            os.eventfd_write(self._descriptor, 1)
            self.join(_END_WITHIN_S)


_forwarder: _Forwarder | None = None


# As soon as this is imported: what programs register later runs before.
@atexit.register
def _end() -> None:
    """Ends the thread at the exit of the interpreter, and logs what it left."""
    if _forwarder is not None:
        _forwarder.end()
        if _forwarder.is_alive():
            return  # a handler holds a lock that this thread would wait for
    forward()
