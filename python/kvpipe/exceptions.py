"""Errors of kvpipe: one class for each remedy.

::

    KVPipeError
    ├── ConfigError (ValueError)              fix the argument or setting
    ├── TransportUnavailableError             install UCX, or use another memory
    ├── ConnectError (ConnectionError)        retry, or another instance
    ├── AuthenticationError (PermissionError) give both sides the same token
    ├── IncompatiblePeerError                 fix the deployment
    ├── PeerLostError (ConnectionError)       recompute; connect again
    ├── TransferTimeoutError (TimeoutError)   retry, or recompute
    ├── CorruptDataError                      recompute
    ├── EndOfPipeError (EOFError)             all was received: done
    ├── ProtocolError                         report a bug
    ├── CapacityError                         slow down
    └── ClosedError                           a bug in the caller
"""


class KVPipeError(Exception):
    """Base of every error that kvpipe raises on purpose."""


class ConfigError(KVPipeError, ValueError):
    """An argument or setting is bad; found before any input or output."""


class TransportUnavailableError(KVPipeError):
    """There is no UCX, it is too old, or it cannot move this kind of memory."""


class ConnectError(KVPipeError, ConnectionError):
    """The peer could not be reached, or did not answer in time."""


class AuthenticationError(KVPipeError, PermissionError):
    """The peers do not hold the same token."""


class IncompatiblePeerError(KVPipeError):
    """Protocol version or fingerprint differ; the message names both sides' values."""


class PeerLostError(KVPipeError, ConnectionError):
    """The peer went away; the pipe or peer object is closed for good."""


class TransferTimeoutError(KVPipeError, TimeoutError):
    """Not done in time; the message says whether the pipe is still usable."""


class CorruptDataError(KVPipeError):
    """A checksum differs: a tensor was not delivered, blocks must not be used."""


class EndOfPipeError(KVPipeError, EOFError):
    """The sender closed the pipe in order and everything was taken."""


class ProtocolError(KVPipeError):
    """The peer sent something that the protocol does not know."""


class CapacityError(KVPipeError):
    """A buffer stayed full for longer than the caller would wait."""


class ClosedError(KVPipeError):
    """This side had closed the object before the call."""
