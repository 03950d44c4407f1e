"""The answers that `examine` collects: plain values, from which findings and reports are made."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from kvpipe._address import is_host_port
from kvpipe._redaction import redact
from kvpipe.exceptions import AuthenticationError, ConfigError, IncompatiblePeerError

_FORM = "control-host:port, or http://host:port,control-host:port"
_PRODUCERS, _CONSUMERS = ("kv_producer", "kv_both"), ("kv_consumer", "kv_both")


@dataclass(frozen=True, slots=True)
class InstanceAddress:
    """An instance to be examined.

    Attributes:
        control: `host:port` of its control port.
        url: Base of its OpenAI-compatible API; empty: no test handoffs, and no clock.
    """

    control: str
    url: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads `control-host:port`, or `http://host:port,control-host:port`, which needs the proxy's packages.

        Raises:
            ConfigError: The text has another form.
        """
        if "://" not in text:
            if not is_host_port(text):
                message = f"address {redact(text)!r}: must be {_FORM}"
                raise ConfigError(message)
            return cls(text)
        from kvpipe.proxy.instances import Instance  # noqa: PLC0415 - control ports alone need no aiohttp

        instance = Instance.parse(text)
        if not instance.control:
            message = f"address {text!r}: add its control port: {instance.url},control-host:port"
            raise ConfigError(message)
        return cls(instance.control, instance.url)


class FailureKind(StrEnum):
    """Causes of a missing answer."""

    TOKEN = "token"  # noqa: S105 - no token
    RELEASE = "release"
    PORT = "port"
    NAME = "name"
    SILENT = "silent"
    UNREACHED = "unreached"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Failure:
    """An address gave no answer.

    Attributes:
        kind: `token`: another token. `release`: another protocol version or kind of session. `port`: the connection is
            refused. `name`: the name of the host has no address. `silent`: it accepts connections and answers nothing.
            `unreached`: there is no route, or no connection in time.
        text: The error.
    """

    kind: FailureKind
    text: str

    @classmethod
    def of(cls, error: Exception) -> Self:
        """The failure behind an error of an address that accepts connections."""
        kinds = {AuthenticationError: FailureKind.TOKEN, IncompatiblePeerError: FailureKind.RELEASE}
        found = (kind for known, kind in kinds.items() if isinstance(error, known))
        return cls(next(found, FailureKind.ERROR), str(error) or type(error).__name__)

    @classmethod
    def without_connection(cls, address: str, error: OSError | None) -> Self:
        """The failure behind an error of the system; none: no connection in time."""
        if isinstance(error, socket.gaierror):
            return cls(FailureKind.NAME, f"the name of {address} has no address: {error.strerror}")
        if isinstance(error, ConnectionRefusedError):
            return cls(FailureKind.PORT, f"{address} refuses connections: nothing listens there")
        if error is None or isinstance(error, TimeoutError):
            reason = "none in time"
        else:
            reason = os.strerror(error.errno) if error.errno else str(error)
        return cls(FailureKind.UNREACHED, f"no connection to {address}: {reason}")


@dataclass(slots=True)
class WorkerFacts:
    """A worker's agent.

    Attributes:
        address: Its address, as the instance advertises it.
        machine: What the worker says of its machine, see `kvpipe._machine`; empty from older releases.
        transport: How this process would read its memory; empty without a session.
        transport_reason: Why that is slower than this host allows, and the remedy.
        failure: Why there is no session.
    """

    address: str
    machine: dict[str, Any] = field(default_factory=dict)
    transport: str = ""
    transport_reason: str = ""
    failure: Failure | None = None


@dataclass(slots=True)
class HttpFacts:
    """The API of an instance.

    Attributes:
        model: Name of its first model; empty if it did not say.
        failure: Why it did not.
        clock_offset_s: Its clock minus this host's, in the middle of what is possible; None if not known.
        clock_uncertainty_s: How far from that it may be. The header `Date` has whole seconds.
    """

    model: str = ""
    failure: Failure | None = None
    clock_offset_s: float | None = None
    clock_uncertainty_s: float = 0.0


@dataclass(slots=True)
class InstanceFacts:
    """An instance.

    Attributes:
        target: Its addresses.
        description: Its description of itself, see docs/reference/wire-control.md; empty before its workers have
            started.
        failure: Why its control port did not answer.
        workers: Its workers' agents.
        http: Its API; None if its URL was not given.
    """

    target: InstanceAddress
    description: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    workers: list[WorkerFacts] = field(default_factory=list)
    http: HttpFacts | None = None

    @property
    def name(self) -> str:
        """Its control port."""
        return self.target.control

    @property
    def fingerprint(self) -> dict[str, str]:
        """Fields that have to be equal on both sides of a handoff, in the order of comparison."""
        return dict(self.description.get("fingerprint", {}))

    @property
    def is_producer(self) -> bool:
        """True if it sends KV."""
        return self.description.get("role") in _PRODUCERS

    @property
    def is_consumer(self) -> bool:
        """True if it receives KV."""
        return self.description.get("role") in _CONSUMERS


@dataclass(slots=True)
class PairFacts:
    """KV of one instance on its way to another.

    Attributes:
        producer: The instance that sends it.
        consumer: The instance that receives it.
        refusal: Why the consumer cannot connect to the producer; empty if it can.
        is_reached: False if the consumer has no connection to the address that the producer advertises.
        handoff: The result of the test handoff, see docs/reference/status.md; None if there was none.
        failure: Why the test handoff has no result.
        skipped: Why there was no test handoff between instances that have URLs.
    """

    producer: InstanceFacts
    consumer: InstanceFacts
    refusal: str = ""
    is_reached: bool = True
    handoff: dict[str, Any] | None = None
    failure: str = ""
    skipped: str = ""

    @property
    def name(self) -> str:
        """Both control ports."""
        return f"{self.producer.name} -> {self.consumer.name}"

    @property
    def address(self) -> str:
        """The producer's control port as it advertises it: the address to which real handoffs connect."""
        return str(self.producer.description.get("address") or self.producer.name)


@dataclass(slots=True)
class Facts:
    """All answers."""

    instances: list[InstanceFacts]
    pairs: list[PairFacts] = field(default_factory=list)
