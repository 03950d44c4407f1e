"""A vLLM instance: a server, or one data-parallel rank of it. Its form on the command line."""

from dataclasses import dataclass
from typing import Self
from urllib.parse import urlsplit

from kvpipe._address import is_host_port
from kvpipe._redaction import redact
from kvpipe.exceptions import ConfigError

_FORM = "http://host:port or http://host:port,control-host:port; https:// where it speaks TLS"


@dataclass(frozen=True, slots=True)
class Instance:
    """A vLLM instance.

    Attributes:
        url: base of its OpenAI-compatible API, without a slash at the end.
        control: `host:port` of its kvpipe control port; empty when not known.
        rank: data-parallel rank behind this URL, as vLLM's header names it; None for the whole server.
    """

    url: str
    control: str = ""
    rank: int | None = None

    @property
    def name(self) -> str:
        """Its URL, with `#dp1` for rank 1 of several: for logs, metrics and reports."""
        return self.url if self.rank is None else f"{self.url}#dp{self.rank}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `http://host:port`, or `http://host:port,control-host:port`.

        Raises:
            ConfigError: the text has another form; the message names both.
        """
        url, comma, control = text.strip().partition(",")
        url = url.rstrip("/")
        if not _is_url(url) or (comma and not is_host_port(control)):
            raise ConfigError(f"instance {redact(text)!r}: must be {_FORM}")
        return cls(url, control)


# All decode instances behind a broker, as one: which of them answers is their workers' choice.
QUEUE = Instance("queue")


def url_of(name: str) -> str:
    """The URL of the instance with this name; no URL of one has a fragment."""
    return name.partition("#")[0]


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    # An `@` in the path ends a password that has a slash and is not percent-encoded.
    has_more = parts.query or parts.fragment or "@" in text
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and port != 0 and not has_more
