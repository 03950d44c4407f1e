"""API keys in files: those of the proxy's clients, and the one that the proxy sends to instances."""

import hashlib
import hmac
import re
from functools import partial
from pathlib import Path

from kvpipe.exceptions import ConfigError
from kvpipe.proxy.files import Reloaded

_API_KEY_FILE, _INSTANCES_API_KEY_FILE = "api_key_file", "instances_api_key_file"
_KEY = re.compile(r"[!-~]+")


class ApiKeys:
    """The keys of clients: any of those in the file, as it was within the last second. Only hashes are kept.

    Args:
        file: has a key a line; lines that begin with `#` are comments.

    Raises:
        ConfigError: the file cannot be read, has no key, or a line that is none.
    """

    def __init__(self, file: Path) -> None:
        self._hashes = Reloaded({_API_KEY_FILE: file}, partial(_hashes_in, file))

    def accepts(self, authorization: str) -> bool:
        """True for `Bearer KEY`; takes the same time for every wrong key."""
        scheme, _, key = authorization.partition(" ")
        found = _hash(key)
        is_known = False
        for known in self._hashes.current():
            is_known |= hmac.compare_digest(found, known)
        return is_known and scheme.lower() == "bearer"


def instances_authorization(file: Path) -> Reloaded[str]:
    """The header `Authorization` for instances, from a file with one key.

    Raises:
        ConfigError: the file cannot be read, or has no key, several, or a line that is none.
    """

    def load(contents: list[bytes]) -> str:
        keys = _keys_in(_INSTANCES_API_KEY_FILE, file, contents[0])
        if len(keys) > 1:
            raise ConfigError(f"{_INSTANCES_API_KEY_FILE}={str(file)!r} has {len(keys)} keys: leave one")
        return f"Bearer {keys[0]}"

    return Reloaded({_INSTANCES_API_KEY_FILE: file}, load)


def _hashes_in(file: Path, contents: list[bytes]) -> list[bytes]:
    return list(map(_hash, _keys_in(_API_KEY_FILE, file, contents[0])))


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _keys_in(name: str, file: Path, content: bytes) -> list[str]:
    """The keys in a file. No message has any of its content."""
    lines = content.decode("utf-8-sig", errors="replace").splitlines()
    keys = {number: line.strip() for number, line in enumerate(lines, 1)}
    keys = {number: key for number, key in keys.items() if key and not key.startswith("#")}
    for number, key in keys.items():
        if not _KEY.fullmatch(key):
            message = f"line {number} is no key: expected ASCII without spaces, one key a line; # begins a comment line"
            raise ConfigError(f"{name}={str(file)!r}: {message}")
    if not keys:
        raise ConfigError(f"{name}={str(file)!r} has no key; write one a line into it")
    return list(keys.values())
