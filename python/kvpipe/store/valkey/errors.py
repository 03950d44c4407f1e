"""Error replies of the server as errors of kvpipe."""

from __future__ import annotations

from typing import Any

from kvpipe.exceptions import (
    AuthenticationError,
    CapacityError,
    CorruptDataError,
    KVPipeError,
    PeerLostError,
    ProtocolError,
)


class UnreachedError(PeerLostError):
    """A server does not accept a connection; nothing was done."""


class NotServingError(PeerLostError):
    """A server refuses for what it or the connection is now; the command has changed nothing.

    Another server may do it, or the same one on a new connection.
    """


class NotNowError(NotServingError):
    """A primary refuses to write for now, and its connections stay of use; the command has changed nothing."""


class LoginError(AuthenticationError):
    """A server refuses the user or password when a connection begins; nothing was done."""


# Errors after which another server may do what was asked of this one.
ELSEWHERE = (LoginError, NotServingError, UnreachedError)


class RefusedError(Exception):
    """An error reply to a command of a subscription: `error_of` its text says what it means."""


_KINDS: dict[str, type[KVPipeError]] = {
    "OOM": CapacityError,
    "WRONGPASS": AuthenticationError,
    "NOPERM": AuthenticationError,
    "WRONGTYPE": CorruptDataError,
    "MISCONF": NotNowError,
    "NOREPLICAS": NotNowError,
    "BUSY": NotNowError,
    "CLUSTERDOWN": NotServingError,
    "LOADING": NotServingError,
    "MASTERDOWN": NotServingError,
    "NOAUTH": NotServingError,
    "READONLY": NotServingError,
}
# Redirections of a cluster: the value is elsewhere, or on its way.
REDIRECTIONS = ("MOVED ", "ASK ", "TRYAGAIN ")


def error_of(text: str, address: str = "") -> KVPipeError:
    """Returns the error for an error reply. The kind may stand within it, when a script has failed."""
    words = text.replace("-", " ").split()
    kind = next((word for word in words if word in _KINDS), "")
    return _KINDS.get(kind, ProtocolError)(f"{address}: the server answered: {text}" if address else text)


def check_serves(replies: list[Any], address: str) -> None:
    """Raises `NotServingError` for the first reply that says so.

    The connection is then of no use, unlike after other error replies.
    """
    for reply in replies:
        if isinstance(reply, str) and isinstance(error := error_of(reply, address), NotServingError):
            raise error
