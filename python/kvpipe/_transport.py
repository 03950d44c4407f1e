"""The transport of this process's pipes and agents, and in tests its twin in memory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvpipe import _kvpipe
from kvpipe.config import ucx_wheel_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

_overrides: list[_kvpipe.Transport] = []


def transport() -> _kvpipe.Transport:
    """Returns the transport for a new pipe or agent."""
    return _overrides[-1] if _overrides else _kvpipe.Transport.host(ucx_wheel_dir())


@contextmanager
def override_transport(replacement: _kvpipe.Transport) -> Iterator[None]:
    """Makes `transport` return another one inside the block, in all threads."""
    _overrides.append(replacement)
    try:
        yield
    finally:
        _overrides.remove(replacement)
