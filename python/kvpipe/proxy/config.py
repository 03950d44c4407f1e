"""Settings of the proxy, checked when they are made."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from kvpipe.exceptions import ConfigError
from kvpipe.proxy.instances import Instance

Dispatch = Literal["just-in-time", "sequential", "store", "amqp"]
OnPrefillFailure = Literal["decode", "fail"]

# Tokens of a prompt from which it is worth a handoff; 0 splits every prompt.
DEFAULT_SPLIT_FROM = 0

_MAX_PORT = 65535
_TIMES = (
    "connect_timeout_s",
    "frozen_after_s",
    "silence_timeout_s",
    "client_timeout_s",
    "control_timeout_s",
    "drain_timeout_s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProxyConfig:
    """Settings of one proxy. Times are in seconds.

    Attributes:
        prefill: instances that compute prompts; each needs its control address, except with `store`. With `amqp` all
            have one, or none has: then D's load from a store.
        decode: instances that answer; the control address is optional (without it, `/status` asks P). None with `amqp`:
            their workers take the requests.
        host: interface to listen on. Default: loopback only.
        port: TCP port to listen on; 0 picks a free one, which the log names.
        ssl_certfile: PEM file with the certificate of the endpoint, and those between it and its CA's; with it the
            endpoint speaks TLS alone. A renewed file is used without a restart.
        ssl_keyfile: PEM file with the certificate's private key, without a passphrase.
        api_key_file: file with the API keys of clients, one a line; each request but those for reports of the proxy
            needs one of them, which instances do not get. A changed file is used without a restart.
        instances_ca_file: PEM file with the CA certificates of `https://` instances; None: those that
            the system trusts.
        instances_api_key_file: file with the API key that instances get with every request, in place of the client's.
            A changed file is used without a restart.
        dispatch: time and path of a request to D. `sequential`: after P's answer. `just-in-time`: before the predicted
            end of the prefill, by the time that D takes to admit a request. `store`: after P's answer. P and D share a
            KV store, from which D loads the KV of P. `amqp`: after P's answer, through a broker, to a D that has room.
        on_prefill_failure: policy for a request without a P left. `decode`: D computes its prompt. `fail`: the client
            gets an error.
        early_token: true if the client of a plain stream is sent P's token before D's stream begins.
        split_from: prompts of fewer tokens go to D alone. Tokens are counted where the prompt is token ids, and else
            estimated from its bytes.
        token: shared secret for the control ports; None leaves the choice to the control client.
        max_body_bytes: largest accepted request body; a request in progress takes about three times its size in memory.
        allowed_origins: web pages that may use the proxy from a browser, as `https://host`; `*` allows all of them.
        allowed_methods: methods that such a page may use; `*` allows all of them.
        allowed_headers: headers that such a page may send; `*` allows all of them.
        allow_credentials: true if such a page may send the browser's cookies and credentials.
        connect_timeout_s: limit for name lookup, TCP and TLS of a connection to an instance, and for a health probe.
        frozen_after_s: silence of an instance that owes an answer, on HTTP and on its control port, after which it is
            frozen: it gets nothing, and its requests go to another one. Without a control port six times as long.
        silence_timeout_s: limit for an instance that takes no byte of a request, or sends none of an answer; then the
            request fails. vLLM sends an answer that is not streamed when it is complete. The default is that of
            OpenAI's clients.
        client_timeout_s: limit for a client that sends no byte of its body, or accepts none of an answer.
        control_timeout_s: limit for one call to a control port (`release`, `result`, `describe`), and for D's answer
            to `/tokenize`.
        drain_timeout_s: time for running requests to end after SIGTERM or SIGINT.
    """

    prefill: tuple[Instance, ...]
    decode: tuple[Instance, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    api_key_file: Path | None = None
    instances_ca_file: Path | None = None
    instances_api_key_file: Path | None = None
    dispatch: Dispatch = "just-in-time"
    on_prefill_failure: OnPrefillFailure = "decode"
    early_token: bool = True
    split_from: int = DEFAULT_SPLIT_FROM
    token: str | None = field(default=None, repr=False)
    max_body_bytes: int = 64 << 20
    allowed_origins: tuple[str, ...] = ()
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    connect_timeout_s: float = 5.0
    frozen_after_s: float = 5.0
    silence_timeout_s: float = 600.0
    client_timeout_s: float = 60.0
    control_timeout_s: float = 5.0
    drain_timeout_s: float = 30.0

    @property
    def way(self) -> Literal["handoff", "store"]:
        """The way of KV from P to D: D fetches it at P's control port, or loads it from a store that both share."""
        has_control = any(instance.control for instance in self.prefill)
        return "handoff" if has_control and self.dispatch != "store" else "store"

    def __post_init__(self) -> None:
        _check_pool("prefill", self.prefill)
        if self.dispatch == "amqp":
            urls = [instance.url for instance in self.decode]
            _check("decode", urls, "empty with dispatch='amqp': workers beside them take the requests", ok=not urls)
        else:
            _check_pool("decode", self.decode)
        has_control = any(instance.control for instance in self.prefill)
        is_checked = has_control if self.dispatch == "amqp" else self.dispatch != "store"
        for instance in self.prefill if is_checked else ():
            wanted = "http://host:port,control-host:port (D fetches the KV cache there), or dispatch='store'"
            _check("prefill", instance.url, wanted, ok=bool(instance.control))
        check_ca_file(self.instances_ca_file, (*self.prefill, *self.decode))
        for key, choices in (("dispatch", get_args(Dispatch)), ("on_prefill_failure", get_args(OnPrefillFailure))):
            _check(key, getattr(self, key), " or ".join(choices), ok=getattr(self, key) in choices)
        _check("port", self.port, f"0 to {_MAX_PORT}", ok=0 <= self.port <= _MAX_PORT)
        _check("split_from", self.split_from, "0 or more tokens", ok=self.split_from >= 0)
        _check("max_body_bytes", self.max_body_bytes, "at least 1", ok=self.max_body_bytes >= 1)
        for key in _TIMES:
            value = getattr(self, key)
            _check(key, value, "more than 0 seconds, and finite", ok=0 < value < math.inf)


def check_ca_file(ca_file: Path | None, instances: Iterable[Instance]) -> None:
    """Raises `ConfigError` for CA certificates that no connection needs."""
    has_tls = any(instance.url.startswith("https://") for instance in instances)
    wanted = "left out, or an instance written as https://host:port"
    _check("instances_ca_file", str(ca_file), wanted, ok=ca_file is None or has_tls)


def _check_pool(key: str, instances: tuple[Instance, ...]) -> None:
    urls = [instance.url for instance in instances]
    example = f"--{key} http://host:port,control-host:port, or without the latter for dispatch='store'"
    _check(key, urls, f"at least one instance: {example}", ok=bool(urls))
    _check(key, urls, "different instances", ok=len(set(urls)) == len(urls))


def _check(key: str, value: object, wanted: str, *, ok: bool) -> None:
    if not ok:
        raise ConfigError(f"{key}={value!r}: must be {wanted}")
