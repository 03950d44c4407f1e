"""Reads the part that a request takes in a handoff from its transfer parameters."""

from __future__ import annotations

import copy
import secrets
from typing import TYPE_CHECKING

from kvpipe.exceptions import ConfigError
from kvpipe.transfer_params import LoadParams, ProduceParams, SaveParams, parse
from kvpipe.vllm.handoff.consumer.consumed import Consumed, LossReason
from kvpipe.vllm.handoff.consumer.state_machine import HandoffLoad
from kvpipe.vllm.handoff.producer.produced import Produced

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvpipe.vllm.handoff.allowed_producers import AllowedProducers
    from kvpipe.vllm.handoff.cache_groups import CacheGroups


def read_params(
    request: Request, allowed: AllowedProducers, max_model_len: int, groups: CacheGroups
) -> Produced | Consumed | None:
    """Reads a request's parameters; returns `None` if it takes part in no handoff, or in one through a store.

    Raises:
        ConfigError: The parameters are wrong. Any client may have sent them.
    """
    params = parse(request.kv_transfer_params, max_model_len=max_model_len)
    if params is None or isinstance(params, SaveParams | LoadParams):
        return None
    if request.prompt_token_ids is None:
        message = "a prompt of embeddings has no token ids, which both engines compare"
        raise ConfigError(message)
    if isinstance(params, ProduceParams):
        if request.max_tokens != 1:
            message = f"max_tokens={request.max_tokens}: a request with do_remote_decode has max_tokens=1"
            raise ConfigError(message)
        if params.handoff is None:
            _drop_min_tokens(request)
        return Produced(params.handoff or secrets.token_bytes(16), request, groups)
    consumed = Consumed(
        params.handoff,
        params.producer,
        request.num_prompt_tokens,
        request,
        given_tokens=params.tokens,
        first_token=params.tokens[0] if params.tokens else None,
    )
    if params.producer:
        allowed.check(params.host)
    else:
        consumed.load = HandoffLoad.without_producer()
        consumed.reason, consumed.loss = "no producer was named", LossReason.NO_PRODUCER
    return consumed


def _drop_min_tokens(request: Request) -> None:
    """Lets a prefill sample any first token, as most clients do.

    Routers that know NixlConnector's fields only drop a client's `min_tokens`, or send 1 whatever the client sent.
    """
    if request.sampling_params is not None and request.sampling_params.min_tokens:
        request.sampling_params = copy.copy(request.sampling_params)
        request.sampling_params.min_tokens = 0
