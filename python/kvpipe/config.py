"""Settings shared by all parts: the tokens and the path of UCX."""

import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path

from kvpipe.exceptions import ConfigError


def resolve_token(token: str | None = None, variables: Mapping[str, str] = os.environ) -> bytes:
    """Returns the shared secret: the argument, else `KVPIPE_TOKEN`, else the content of `KVPIPE_TOKEN_FILE`, else none.

    An empty variable counts as unset. `variables` may be those of a process that is started.

    Raises:
        ConfigError: The token is not a string, or the token file cannot be read or is empty.
    """
    if token is None:
        return _token_of_variables("KVPIPE_TOKEN", "KVPIPE_TOKEN_FILE", variables)
    if not isinstance(token, str):
        message = f"token is {type(token).__name__}: expected a string"
        raise ConfigError(message)
    return token.encode(errors="surrogateescape")


def resolve_tokens(token: str | None = None, variables: Mapping[str, str] = os.environ) -> bytes | tuple[bytes, bytes]:
    """Returns the secrets that a listener accepts: that of `resolve_token`, and the next one if there is one.

    The next one is `KVPIPE_TOKEN_NEXT`, else the content of `KVPIPE_TOKEN_NEXT_FILE`.

    Raises:
        ConfigError: As for `resolve_token`.
    """
    current = resolve_token(token, variables)
    following = _token_of_variables("KVPIPE_TOKEN_NEXT", "KVPIPE_TOKEN_NEXT_FILE", variables)
    return (current, following) if following else current


def _token_of_variables(name: str, file_name: str, variables: Mapping[str, str]) -> bytes:
    token = variables.get(name)
    return token.encode(errors="surrogateescape") if token else _token_of_file(file_name, variables.get(file_name))


def _token_of_file(name: str, path: str | None) -> bytes:
    if not path:
        return b""
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        message = f"{name}={path!r} cannot be read: {error}"
        raise ConfigError(message) from error
    if not token:
        message = f"{name}={path!r} is empty; write the token into it, or unset the variable"
        raise ConfigError(message)
    return token


def ucx_wheel_dir() -> str | None:
    """Returns the folder of PyPI's libucx package, if it is installed, without importing it."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        return None
    return next(iter(spec.submodule_search_locations))
