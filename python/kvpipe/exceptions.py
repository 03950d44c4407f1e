"""Errors of kvpipe: one class for each remedy.

::

    KVPipeError
    ├── ConfigError (ValueError)              fix the argument or setting
    ├── TransportUnavailableError             install UCX, or use other memory
    ├── ConnectError (ConnectionError)        retry, or another instance
    ├── AuthenticationError (PermissionError) give both sides the same token
    ├── IncompatiblePeerError                 fix the deployment
    ├── PeerLostError (ConnectionError)       recompute; connect again
    ├── TransferTimeoutError (TimeoutError)   retry, or recompute
    ├── CorruptDataError                      recompute
    ├── EndOfPipeError (EOFError)             everything was received: done
    ├── ProtocolError                         report a bug
    ├── CapacityError                         slow down
    └── ClosedError                           fix the caller
"""


class KVPipeError(Exception):
    """Base of every error that kvpipe raises on purpose."""


class ConfigError(KVPipeError, ValueError):
    """An argument or setting is wrong; found before any input or output."""


class TransportUnavailableError(KVPipeError):
    """A device cannot be used: its driver or UCX is missing, too old, or cannot move this kind of memory."""


class ConnectError(KVPipeError, ConnectionError):
    """The peer could not be reached, or did not answer in time."""


class AuthenticationError(KVPipeError, PermissionError):
    """The peers have different tokens."""


class IncompatiblePeerError(KVPipeError):
    """Protocol version or fingerprint differ; the message has the values of both sides."""


class PeerLostError(KVPipeError, ConnectionError):
    """The peer was lost; the pipe or peer object stays closed."""


class TransferTimeoutError(KVPipeError, TimeoutError):
    """The operation was not done in time; the message says whether the pipe is still usable."""


class CorruptDataError(KVPipeError):
    """A checksum does not match: the tensor was not delivered, or the blocks must not be used."""


class EndOfPipeError(KVPipeError, EOFError):
    """The sender closed the pipe, and everything was received."""


class ProtocolError(KVPipeError):
    """The peer violated the protocol."""


class CapacityError(KVPipeError):
    """A buffer stayed full for longer than the timeout, or a block is still busy with a transfer that was late."""


class ClosedError(KVPipeError):
    """This side closed the object before the call."""
