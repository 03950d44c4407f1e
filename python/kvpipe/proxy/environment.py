"""Settings of the proxy from the environment and a file `.env`, by the names of other proxies."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dotenv import dotenv_values

from kvpipe.exceptions import ConfigError
from kvpipe.proxy.instances import Instance

logger = logging.getLogger(__name__)

_NAMES = ("PREFILL_ENDPOINTS", "DECODE_ENDPOINTS", "LISTEN_HOST", "LISTEN_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The settings of a proxy in the environment; flags come before it.

    Attributes:
        prefill: instances of `PREFILL_ENDPOINTS`.
        decode: instances of `DECODE_ENDPOINTS`.
        host: `LISTEN_HOST`; None if it is not set.
        port: `LISTEN_PORT`; None if it is not set.
    """

    prefill: tuple[Instance, ...] = ()
    decode: tuple[Instance, ...] = ()
    host: str | None = None
    port: int | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ, file: Path = Path(".env")) -> Self:
        """Read the environment, and the file for what is not set there. Keys of the file that mean nothing are logged.

        Raises:
            ConfigError: a value has another form; the message names it and what is expected.
        """
        values = {name: value for name, value in dotenv_values(file).items() if value} if file.is_file() else {}
        if ignored := sorted(set(values) - set(_NAMES)):
            logger.info("environment.ignored file=%s keys=%s", file, ",".join(ignored))
        values |= {name: environment[name] for name in _NAMES if environment.get(name)}
        return cls(
            prefill=_endpoints("PREFILL_ENDPOINTS", values),
            decode=_endpoints("DECODE_ENDPOINTS", values),
            host=values.get("LISTEN_HOST"),
            port=_port(values),
        )


def _endpoints(name: str, values: Mapping[str, str]) -> tuple[Instance, ...]:
    """Reads URLs that commas separate; the control address of an instance may follow its URL."""
    instances: list[str] = []
    for part in filter(None, (part.strip() for part in values.get(name, "").split(","))):
        if instances and "://" not in part:
            instances[-1] += f",{part}"
        else:
            instances.append(part)
    try:
        return tuple(map(Instance.parse, instances))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}; commas separate instances") from error


def _port(values: Mapping[str, str]) -> int | None:
    port = values.get("LISTEN_PORT")
    if port is None:
        return None
    if not port.isdecimal():
        raise ConfigError(f"LISTEN_PORT={port!r}: must be a number")
    return int(port)
