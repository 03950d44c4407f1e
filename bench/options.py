"""Checks of arguments that several benchmarks have. A wrong one is refused before anything is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from bench import machine
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def refuse(name: str, value: object, expected: str) -> NoReturn:
    """Refuses an argument.

    Raises:
        ConfigError: Always.
    """
    message = f"{name} {value}: {expected}"
    raise ConfigError(message)


def require_at_least(least: int, **values: int) -> None:
    """Checks numbers.

    Raises:
        ConfigError: One of them is too small.
    """
    for name, value in values.items():
        if value < least:
            refuse(f"--{name}", value, f"expected at least {least}")


def require_folders(*files: Path | None) -> None:
    """Checks that the files to write can be made.

    Raises:
        ConfigError: The folder of one of them is not there.
    """
    for file in files:
        if file and not file.absolute().parent.is_dir():
            refuse("file", file, "there is no such folder")


def require_memory(num_bytes: int, use: str, remedy: str) -> None:
    """Checks that there is enough memory, where the machine tells how much is available.

    Raises:
        ConfigError: There is too little.
    """
    there = machine.available_bytes()
    if there is not None and num_bytes > there:
        needed, available = f"{num_bytes / 1e9:.1f} GB for {use}", f"{there / 1e9:.1f} GB are available"
        message = f"needs about {needed}, {available}; {remedy}"
        raise ConfigError(message)
