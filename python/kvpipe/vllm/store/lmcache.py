"""Settings in a file that was written for LMCache: those that mean something here, and the names of the others."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpipe._redaction import redact
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

VARIABLE = "LMCACHE_CONFIG_FILE"

# KIVI's own number of bits.
_SERDES = {"naive": "naive", "kivi": "kivi2", "cachegen": "cachegen"}
_LOCAL = "KV in the instance's own memory is vLLM's prefix cache"
_REASONS = {
    "local_device": _LOCAL,
    "local_cpu": _LOCAL,
    "max_local_cpu_size": _LOCAL,
    "local_disk": "a disk is the store's: kvpipe store serve --disk",
    "max_local_disk_size": "a disk is the store's: kvpipe store serve --disk-capacity",
    "pipelined_backend": "chunks are always loaded side by side, while the engine goes on",
    "save_decode_cache": "only chunks of prompts are saved",
    "error_handling": "what fails is always computed again",
}
_UNKNOWN = "it has no counterpart"


@dataclass(frozen=True)
class LMCacheSettings:
    """Settings in a file of LMCache's.

    Attributes:
        settings: Settings of `KVStoreConnector`, by their names there.
        ignored: Keys that mean nothing here, with the reason.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)


def read_lmcache_settings(environment: Mapping[str, str]) -> LMCacheSettings:
    """Reads the file that `LMCACHE_CONFIG_FILE` names; without the variable there are no settings.

    Raises:
        ConfigError: The file cannot be read, is no YAML mapping, or a value cannot be kept; the message names it.
    """
    path = environment.get(VARIABLE)
    if not path:
        return LMCacheSettings()
    keys = _read(Path(path))
    found = LMCacheSettings()
    for key, value in keys.items():
        if key == "chunk_size":
            found.settings["chunk_size"] = value
        elif key == "remote_url":
            found.settings.update({} if value is None else {"store": _store(path, value)})
        elif key == "remote_serde":
            found.settings.update({} if value is None else {"serde": _serde(path, value)})
        else:
            found.ignored[key] = _REASONS.get(key, _UNKNOWN)
    return found


def _read(path: Path) -> dict[str, Any]:
    import yaml  # noqa: PLC0415 - it comes with vLLM

    try:
        keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        message = f"{VARIABLE}={str(path)!r} cannot be read: {error}"
        raise ConfigError(message) from error
    if keys is None:
        return {}
    if not isinstance(keys, dict):
        message = f"{VARIABLE}={str(path)!r}: expected keys and values, got {type(keys).__name__}"
        raise ConfigError(message)
    return {str(key): value for key, value in keys.items()}


def _store(path: str, url: object) -> str:
    if isinstance(url, str) and not url.startswith("lm://"):
        return url
    shown = redact(url) if isinstance(url, str) else url
    message = (
        f"remote_url={shown!r} in {path}: kvpipe does not speak to LMCache's own server; "
        'start `kvpipe store serve` there and write "kvpipe://host:port", or use "redis://host:port"'
    )
    raise ConfigError(message)


def _serde(path: str, name: object) -> str:
    if isinstance(name, str) and name in _SERDES:
        return _SERDES[name]
    message = f"remote_serde={name!r} in {path}: expected one of {', '.join(_SERDES)}"
    raise ConfigError(message)
