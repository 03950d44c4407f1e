"""Settings shared by all parts: the token and the path of UCX."""

import importlib.util
import os
from pathlib import Path

from kvpipe.exceptions import ConfigError


def resolve_token(token: str | None = None) -> bytes:
    """Returns the shared secret: the argument, else `KVPIPE_TOKEN`, else the content of `KVPIPE_TOKEN_FILE`, else none.

    An empty variable counts as unset.

    Raises:
        ConfigError: The token is not a string, or the token file cannot be read or is empty.
    """
    if token is None:
        token = os.environ.get("KVPIPE_TOKEN") or None
    if token is None:
        return _token_of_file(os.environ.get("KVPIPE_TOKEN_FILE"))
    if not isinstance(token, str):
        message = f"token is {type(token).__name__}: expected a string"
        raise ConfigError(message)
    return token.encode(errors="surrogateescape")


def _token_of_file(path: str | None) -> bytes:
    if not path:
        return b""
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        message = f"KVPIPE_TOKEN_FILE={path!r} cannot be read: {error}"
        raise ConfigError(message) from error
    if not token:
        message = f"KVPIPE_TOKEN_FILE={path!r} is empty; write the token into it, or unset the variable"
        raise ConfigError(message)
    return token


def ucx_wheel_dir() -> str | None:
    """Returns the folder of PyPI's libucx package, if it is installed, without importing it."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(spec.submodule_search_locations))
