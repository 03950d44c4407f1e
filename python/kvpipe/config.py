"""Settings that all parts share: the token, and where UCX is."""

import importlib.util
import os
from pathlib import Path

from kvpipe.exceptions import ConfigError


def resolve_token(token: str | None = None) -> bytes:
    """The shared secret: the argument, else `KVPIPE_TOKEN`, else the content of `KVPIPE_TOKEN_FILE`, else none.

    Raises:
        ConfigError: The token file cannot be read.
    """
    if token is None:
        token = os.environ.get("KVPIPE_TOKEN")
    if token is not None:
        return token.encode()
    path = os.environ.get("KVPIPE_TOKEN_FILE")
    if not path:
        return b""
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        message = f"KVPIPE_TOKEN_FILE={path!r} cannot be read: {error}"
        raise ConfigError(message) from error


def ucx_wheel_dir() -> str | None:
    """The folder of PyPI's libucx package, when it is installed. Nothing is imported."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(spec.submodule_search_locations))
