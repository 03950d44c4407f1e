"""Settings of the connector: `kv_connector_extra_config`, then `KVPIPE_*`, then the default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpipe.exceptions import ConfigError
from kvpipe.vllm.handoff.addresses import Addresses
from kvpipe.vllm.handoff.allowed_producers import AllowedProducers
from kvpipe.vllm.settings import check_on_load_failure, read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

INTEGRITY = ("auto", "checksum", "validate")


@dataclass(frozen=True, kw_only=True)
class ConnectorConfig:
    """Settings of one engine.

    Attributes:
        listen: `host:port` of the control port. Port 0 picks a free port, which the log names; each data-parallel rank
            adds its rank to another port. The workers' agents listen on the same host. A wildcard needs `advertise`.
        advertise: `host` or `host:port` that other instances get instead of `listen`: for the control port both,
            for the agents the host. Empty: `listen`'s.
        agent_ports: `first-last`: each worker's agent takes the first free port of these. Empty: any free port.
        on_load_failure: Policy for a request whose KV does not arrive: `recompute` (decode computes the missing KV) or
            `fail` (HTTP 500; the handoff's result has the reason). It applies to the whole engine. Empty: as vLLM's
            `kv_load_failure_policy` says, see `load_failure_policy`.
        integrity: Verification of blocks: `checksum` (the producer computes checksums of its blocks, the consumer
            compares), `validate` (the consumer asks the producer after its last read whether the blocks were kept), or
            `auto` (checksums in host memory, validation on a device). The producer's setting decides; a consumer with
            `checksum` refuses blocks without checksums.
        allowed_producers: Hosts that this engine connects to as a consumer: names, addresses and networks, separated by
            commas. Empty: any that a request names.
        lease_s: Seconds that finished blocks wait for a first consumer before they are freed.
        open_timeout_s: Seconds that a consumer waits for a handoff that its producer does not know.
        handoff_timeout_s: Seconds from a consumer's request to its KV. It limits a producer that is alive and keeps
            computing.
        silence_s: Seconds without data from a peer after which the peer counts as lost.
        trace: File to which handoffs are traced, in Chrome's trace format. All processes of a host may share it. Empty
            turns tracing off.
    """

    listen: str = "127.0.0.1:0"
    advertise: str = ""
    agent_ports: str = ""
    on_load_failure: str = ""
    integrity: str = "auto"
    allowed_producers: str = ""
    lease_s: float = 30.0
    open_timeout_s: float = 30.0
    handoff_timeout_s: float = 300.0
    silence_s: float = 10.0
    trace: str = ""

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> ConnectorConfig:
        """Reads the settings.

        Raises:
            ConfigError: A key is unknown or a value is bad; the message names it and what is expected.
        """
        config = cls(**read_settings(cls, extra, lambda name: f"KVPIPE_{name.upper()}"))
        config._check()
        return config

    @property
    def addresses(self) -> Addresses:
        """The addresses of the settings `listen`, `advertise` and `agent_ports`."""
        return Addresses.parse(listen=self.listen, advertise=self.advertise, agent_ports=self.agent_ports)

    def _check(self) -> None:
        check_on_load_failure(self.on_load_failure)
        if self.integrity not in INTEGRITY:
            message = (
                f"integrity={self.integrity!r}: KV of handoffs is always verified, by one of {', '.join(INTEGRITY)}; "
                'write "integrity": "auto" into kv_connector_extra_config'
            )
            raise ConfigError(message)
        AllowedProducers(self.allowed_producers)
        _ = self.addresses
