"""`kv_transfer_params` of a request, written and read.

The fields are those of vLLM's NixlConnector, so that routers which know that connector pass them on: a router tells the
producer `do_remote_decode`, and gives the consumer what the producer's answer has. `remote_request_id` is the handoff,
`remote_host` and `remote_port` are the producer's control port. A key `kvpipe` may say more; no router has to know it.

A handoff through a store has the key `kvpipe` alone: its two engines need not know each other.

Source: `kv_connector/v1/nixl/pull_scheduler.py` of vLLM 0.32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpipe._address import join_host_port
from kvpipe.control import parse_handoff
from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

# A DNS name. Results name addresses that could not be reached, and results are kept.
_LONGEST_HOST = 253
_LAST_PORT = 65535
# No vocabulary has as many tokens. Python refuses to write an integer of thousands of digits.
_TOKENS_CAP = 1 << 63


@dataclass(frozen=True, slots=True)
class ProduceParams:
    """Another engine reads the request's KV.

    Attributes:
        handoff: The handoff's id; `None`: the producer chooses one, and its answer has it.
    """

    handoff: bytes | None


@dataclass(frozen=True, slots=True)
class ConsumeParams:
    """Another engine computes the request's KV.

    Attributes:
        handoff: The handoff's id.
        host: Host of the producer's control port; empty: there is no producer, and the request brings tokens.
        port: The control port.
        tokens: Without a producer, the first tokens of the answer, which the client has already. A producer's token
            comes from itself, with the prompt that it belongs to.
    """

    handoff: bytes
    host: str
    port: int
    tokens: tuple[int, ...] = ()

    @property
    def producer(self) -> str:
        """The producer's control port as `host:port`; empty without one."""
        return join_host_port(self.host, self.port) if self.host else ""


@dataclass(frozen=True, slots=True)
class SaveParams:
    """The request's KV and first token are saved in a store, for one other request.

    Attributes:
        handoff: The handoff's id.
    """

    handoff: bytes


@dataclass(frozen=True, slots=True)
class LoadParams:
    """Another engine saves the request's KV and first token in a store.

    Attributes:
        handoff: The handoff's id.
        first_token: The token, from the answer of that engine: a client may have it already. The request goes on from
            it, also without an entry in the store; not if that is of another prompt or adapter.
    """

    handoff: bytes
    first_token: int | None = None


TransferParams = ProduceParams | ConsumeParams | SaveParams | LoadParams


def produce(handoff: str) -> dict[str, Any]:
    """Returns parameters of a request that produces a handoff with this id."""
    return {"do_remote_decode": True, "do_remote_prefill": False, "kvpipe": {"handoff": handoff}}


def consume(handoff: str, producer: str) -> dict[str, Any]:
    """Returns parameters of a request that consumes a handoff.

    Args:
        handoff: The handoff's id, 32 hex digits.
        producer: The producer's control port, `host:port`.
    """
    host, _, port = producer.rpartition(":")
    return {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_request_id": handoff,
        "remote_host": host.removeprefix("[").removesuffix("]"),
        "remote_port": int(port),
    }


def resume(handoff: str, tokens: Sequence[int]) -> dict[str, Any]:
    """Returns parameters of a request that another engine has begun to answer, and that continues alone.

    Args:
        handoff: A new id, of which the engine keeps the result.
        tokens: The tokens of the answer so far, one at least. The engine samples them again, then goes on.
    """
    return {"kvpipe": {"handoff": handoff, "tokens": list(tokens)}}


def save(handoff: str) -> dict[str, Any]:
    """Returns parameters of a request that saves its first token, and the KV that it belongs to, in a store.

    Args:
        handoff: A new id, 32 hex digits.
    """
    return {"kvpipe": {"handoff": handoff, "store": "save"}}


def load(handoff: str, first_token: int | None = None) -> dict[str, Any]:
    """Returns parameters of a request that loads what another one has saved with `save`; that one's answer has them.

    Args:
        handoff: The id.
        first_token: The token that the other one has sampled, if a client may have it already.
    """
    known = {} if first_token is None else {"first_token": first_token}
    return {"kvpipe": {"handoff": handoff, "store": "load", **known}}


def produced(
    handoff: str,
    producer: str,
    *,
    engine_id: str,
    parallel_size: int,
    num_tokens: int,
    block_ids: Sequence[Sequence[int]],
    first_token: int,
) -> dict[str, Any]:
    """Returns a producer's answer: every field that NixlConnector's has, for routers that rebuild the object."""
    return consume(handoff, producer) | {
        "remote_block_ids": [list(of_group) for of_group in block_ids],
        "remote_engine_id": engine_id,
        "tp_size": parallel_size,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "kvpipe": {"handoff": handoff, "num_tokens": num_tokens, "first_token": first_token},
    }


def parse(params: object, *, max_model_len: int | None = None) -> TransferParams | None:
    """Parses a request's parameters; returns `None` if they ask for nothing.

    Args:
        params: The parameters.
        max_model_len: The engine's longest sequence, which bounds the tokens that a request may bring; `None`: the
            caller does not use them before the scheduler has compared.

    Raises:
        ConfigError: The parameters are wrong. Any client may have sent them, so that the message shows no more of them
            than is bounded.
    """
    if not isinstance(params, dict):
        return None
    ours = params.get("kvpipe")
    if ours is not None and not isinstance(ours, dict):
        message = f"kvpipe of type {type(ours).__name__}: expected a JSON object"
        raise ConfigError(message)
    ours = ours or {}
    is_producing, is_consuming = params.get("do_remote_decode"), params.get("do_remote_prefill")
    if is_producing and is_consuming:
        message = "do_remote_decode and do_remote_prefill: expected one of them, a request has one role"
        raise ConfigError(message)
    if (store := ours.get("store")) is not None:
        return _through_store(store, ours, is_alone=not (is_producing or is_consuming))
    if is_producing:
        handoff = ours.get("handoff")
        return ProduceParams(None if handoff is None else parse_handoff(handoff))
    if is_consuming:
        host, port = _host(params.get("remote_host")), _port(params.get("remote_port"))
        return ConsumeParams(parse_handoff(params.get("remote_request_id")), host, port)
    if (tokens := ours.get("tokens")) is not None:
        return ConsumeParams(parse_handoff(ours.get("handoff")), "", 0, _tokens(tokens, max_model_len))
    if ours:
        message = "kvpipe alone: expected do_remote_decode or do_remote_prefill beside it, a store, or tokens"
        raise ConfigError(message)
    return None


def _through_store(store: object, ours: dict[str, Any], *, is_alone: bool) -> SaveParams | LoadParams:
    if not is_alone:
        message = "kvpipe.store beside do_remote_decode or do_remote_prefill: expected one of them"
        raise ConfigError(message)
    if store == "save":
        return SaveParams(parse_handoff(ours.get("handoff")))
    if store == "load":
        token = ours.get("first_token")
        return LoadParams(parse_handoff(ours.get("handoff")), None if token is None else _token(token, "first_token"))
    message = f"kvpipe.store of type {type(store).__name__}: expected 'save' or 'load'"
    raise ConfigError(message)


def _host(host: object) -> str:
    if not isinstance(host, str) or not 0 < len(host) <= _LONGEST_HOST:
        shown = repr(host[:_LONGEST_HOST]) if isinstance(host, str) else type(host).__name__
        message = f"remote_host={shown}: expected the host of the producer's control port"
        raise ConfigError(message)
    return host


def _port(port: object) -> int:
    if isinstance(port, str) and port.isascii() and port.isdecimal() and len(port) <= len(str(_LAST_PORT)):
        port = int(port)
    if type(port) is not int or not 0 < port <= _LAST_PORT:
        message = f"remote_port of type {type(port).__name__}: expected a port, 1 to {_LAST_PORT}"
        raise ConfigError(message)
    return port


def _tokens(tokens: object, max_model_len: int | None) -> tuple[int, ...]:
    if not isinstance(tokens, list):
        message = f"tokens of type {type(tokens).__name__}: expected a list of token ids"
        raise ConfigError(message)
    if not tokens:
        message = "tokens of length 0: expected one at least"
        raise ConfigError(message)
    if max_model_len is not None and len(tokens) > max_model_len:
        message = f"tokens of length {len(tokens)}: expected {max_model_len} at most, the engine's max_model_len"
        raise ConfigError(message)
    return tuple(_token(token, "tokens") for token in tokens)


def _token(token: object, name: str) -> int:
    if type(token) is not int or abs(token) > _TOKENS_CAP:
        message = f"{name} of type {type(token).__name__}: expected a token id"
        raise ConfigError(message)
    return token
