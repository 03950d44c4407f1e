"""Reads the settings of a connector: `kv_connector_extra_config`, then variables, then the default."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_ON_LOAD_FAILURE = ("recompute", "fail")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def read_settings(
    config: type[Any],
    extra: Mapping[str, Any],
    variable_of: Callable[[str], str],
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns a value for each field of a dataclass, of the type of its default. Numbers are above 0.

    Args:
        config: The dataclass.
        extra: `kv_connector_extra_config`.
        variable_of: Returns the environment variable of a field.
        defaults: Values that are better defaults than those of the dataclass.

    Raises:
        ConfigError: A key is unknown or a value is bad; the message names it and what is expected.
    """
    known = {field.name: field for field in fields(config)}
    unknown = sorted(set(extra) - set(known))
    if unknown:
        message = f"unknown key {unknown[0]!r} in kv_connector_extra_config; known: {', '.join(sorted(known))}"
        raise ConfigError(message)
    defaults = {name: field.default for name, field in known.items()} | dict(defaults or {})
    return {
        name: _value(name, extra.get(name, os.environ.get(variable_of(name), defaults[name])), field.default)
        for name, field in known.items()
    }


def check_on_load_failure(value: str) -> None:
    """Refuses another value of the setting `on_load_failure` than those that there are; empty: not given.

    Raises:
        ConfigError: It is one; the message names it and what is expected.
    """
    if value and value not in _ON_LOAD_FAILURE:
        message = f"on_load_failure={value!r}: expected one of {', '.join(_ON_LOAD_FAILURE)}"
        raise ConfigError(message)


def _value(name: str, value: Any, default: Any) -> Any:
    if isinstance(default, bool):
        return _boolean(name, value)
    if isinstance(default, float):
        return _seconds(name, value)
    if isinstance(default, int):
        return _count(name, value)
    if isinstance(value, str):
        return value
    message = f"{name}={value!r}: expected a string"
    raise ConfigError(message)


def _seconds(name: str, value: Any) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        message = f"{name}={value!r}: expected a number of seconds above 0"
        raise ConfigError(message)
    return seconds


def _count(name: str, value: Any) -> int:
    try:
        count = int(value) if isinstance(value, str) or type(value) is int else 0
    except ValueError:
        count = 0
    if count < 1:
        message = f"{name}={value!r}: expected a whole number above 0"
        raise ConfigError(message)
    return count


def _boolean(name: str, value: Any) -> bool:
    found = value if isinstance(value, bool) else _BOOLEANS.get(str(value).lower())
    if found is None:
        message = f"{name}={value!r}: expected true or false"
        raise ConfigError(message)
    return found
