"""Settings in files that may change while the proxy runs: certificates and keys."""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from kvpipe.exceptions import ConfigError

T = TypeVar("T")

_LOOK_EVERY_S = 1.0

logger = logging.getLogger(__name__)


def read(name: str, path: Path) -> bytes:
    """The content of the file that a setting names; raises `ConfigError` with both."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name}={str(path)!r} cannot be read: {error.strerror}") from error


class Reloaded(Generic[T]):
    """A value that is made of files, and made anew when their content has changed.

    It is looked at when it is used, at most once a second: so an idle proxy does nothing, and no signal has to be sent.
    Contents are compared, because times of files have the granularity of a kernel tick, and Kubernetes exchanges links.
    Files that cannot be read or used leave the value as it is, and are logged once.

    Args:
        files: the files, by the settings that name them.
        load: makes the value; raises `ConfigError`.

    Raises:
        ConfigError: the files cannot be read or used.
    """

    def __init__(self, files: Mapping[str, Path], load: Callable[[], T]) -> None:
        self._files = files
        self._load = load
        self._digest = self._digest_of_files()
        self._value = load()
        self._problem = ""
        self._looked_at_s = time.monotonic()

    def current(self) -> T:
        """The value of the files as they were within the last second."""
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= _LOOK_EVERY_S:
            self._looked_at_s = now_s
            self._look()
        return self._value

    def _look(self) -> None:
        problem = ""
        try:
            digest = self._digest_of_files()
            if digest != self._digest:
                self._value = self._load()
                self._digest = digest
                logger.info("file.reloaded files=%s", ",".join(map(str, self._files.values())))
        except ConfigError as error:
            problem = str(error)
            if problem != self._problem:
                logger.warning("file.refused reason=%r", problem)
        self._problem = problem

    def _digest_of_files(self) -> list[bytes]:
        return [hashlib.sha256(read(name, path)).digest() for name, path in self._files.items()]
