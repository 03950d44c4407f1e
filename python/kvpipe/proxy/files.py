"""Settings in files that may change while the proxy runs: certificates and keys."""

import hashlib
import logging
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from kvpipe.exceptions import ConfigError

T = TypeVar("T")

_CHECK_INTERVAL_S = 1.0

logger = logging.getLogger(__name__)


def read(name: str, path: Path) -> bytes:
    """The content of the regular file that a setting names; raises `ConfigError` with both."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            message = f"{name}={str(path)!r} is not a regular file: a pipe or a folder cannot be read again"
            raise ConfigError(message)
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
        load: makes the value of the files' contents, in the order of `files`; raises `ConfigError`.

    Raises:
        ConfigError: the files cannot be read or used.
    """

    def __init__(self, files: Mapping[str, Path], load: Callable[[list[bytes]], T]) -> None:
        self._files = files
        self._load = load
        contents = self._contents()
        self._digests = _digests(contents)
        self._value = load(contents)
        self._problem = ""
        self._checked_at_s = time.monotonic()

    def current(self) -> T:
        """The value of the files as they were within the last second."""
        now_s = time.monotonic()
        if now_s - self._checked_at_s >= _CHECK_INTERVAL_S:
            self._checked_at_s = now_s
            self._reload_if_changed()
        return self._value

    def _reload_if_changed(self) -> None:
        try:
            contents = self._contents()
            digests = _digests(contents)
            if digests == self._digests:
                return
            self._digests = digests  # those of refused files, too: they are not tried again until they change
            self._value = self._load(contents)
        except ConfigError as error:
            if str(error) != self._problem:
                logger.warning("file.refused reason=%r", str(error))
            self._problem = str(error)
            return
        self._problem = ""
        logger.info("file.reloaded files=%s", ",".join(map(str, self._files.values())))

    def _contents(self) -> list[bytes]:
        return [read(name, path) for name, path in self._files.items()]


def _digests(contents: list[bytes]) -> list[bytes]:
    return [hashlib.sha256(content).digest() for content in contents]
