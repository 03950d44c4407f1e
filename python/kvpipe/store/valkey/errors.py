"""Errors of redis-py and of the server as those of kvpipe."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import redis.exceptions

from kvpipe.exceptions import (
    AuthenticationError,
    CapacityError,
    CorruptDataError,
    KVPipeError,
    PeerLostError,
    ProtocolError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_KINDS: dict[str, type[KVPipeError]] = {
    "OOM": CapacityError,
    "NOAUTH": AuthenticationError,
    "WRONGPASS": AuthenticationError,
    "NOPERM": AuthenticationError,
    "WRONGTYPE": CorruptDataError,
    "CLUSTERDOWN": PeerLostError,
    "LOADING": PeerLostError,
    "MASTERDOWN": PeerLostError,
    "MISCONF": PeerLostError,
    "READONLY": PeerLostError,
}
# Redirections of a cluster: the value is elsewhere, or on its way.
REDIRECTIONS = ("MOVED ", "ASK ", "TRYAGAIN ")


class RefusedError(Exception):
    """An error reply to a command of a subscription: `error_of` its text says what it means."""


def error_of(text: str, address: str = "") -> KVPipeError:
    """Returns the error for an error reply. The kind may stand within it, when a script has failed."""
    words = text.replace("-", " ").split()
    kind = next((word for word in words if word in _KINDS), "")
    return _KINDS.get(kind, ProtocolError)(f"{address}: the server answered: {text}" if address else text)


@contextmanager
def translated(address: str) -> Iterator[None]:
    """Raises errors of redis-py as those of kvpipe."""
    errors = redis.exceptions
    try:
        yield
    except (errors.AuthenticationError, errors.AuthorizationError, errors.NoPermissionError) as error:
        raise AuthenticationError(f"{address} refuses the user or password: {error}") from error
    except errors.OutOfMemoryError as error:
        raise CapacityError(f"{address} is out of memory: {error}") from error
    except errors.ReadOnlyError as error:
        raise PeerLostError(f"{address} is a read-only replica: {error}") from error
    except (errors.ConnectionError, errors.TimeoutError, errors.ClusterError, errors.RedisClusterException) as error:
        raise PeerLostError(f"lost {address}: {error}") from error
    except errors.ResponseError as error:
        raise error_of(str(error), address) from error
    except (OSError, errors.RedisError) as error:
        raise PeerLostError(f"lost {address}: {error}") from error
