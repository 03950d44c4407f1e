"""Selects instances for a request. Pure: no input or output, no clock."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from kvpipe.proxy.instances import Instance


class RoundRobin:
    """Gives each request the next instance, and the others after it in case that one fails.

    Args:
        instances: the instances.
        num_partners: instances of the other role, which are taken in turn by the same requests. Two turns in step would
            use two of the four pairs of 2 P and 2 D; with this argument all pairs are used alike.
    """

    def __init__(self, instances: Sequence[Instance], num_partners: int = 0) -> None:
        self._instances = tuple(instances)
        self._num_requests = 0
        # Requests after which both turns are where they began.
        self._period = math.lcm(len(self._instances), num_partners) if num_partners else math.inf

    def __repr__(self) -> str:
        return f"<RoundRobin next={self._instances[self._start()].url} of {len(self._instances)}>"

    def order(self, is_avoided: Callable[[Instance], bool]) -> list[Instance]:
        """All instances, the next one first; those that are avoided come last, so that they use up few retries."""
        start = self._start()
        self._num_requests += 1
        turn = [*self._instances[start:], *self._instances[:start]]
        return sorted(turn, key=is_avoided)

    def _start(self) -> int:
        return (self._num_requests + int(self._num_requests // self._period)) % len(self._instances)


def goes_to_decode_alone(body: dict[str, Any]) -> bool:
    """True if a request cannot be one handoff: it has several sequences, or returns outputs about its prompt.

    Values are parsed as leniently as in vLLM (`"n": "2"` is 2 there). In doubt D works alone, which is always correct,
    only slower.
    """
    return (
        _has_several_prompts(body)
        or body.get("n") not in (None, 1)
        or body.get("best_of") not in (None, 1)
        or bool(body.get("use_beam_search"))
        or bool(body.get("echo"))
        or body.get("prompt_logprobs") is not None
    )


def _has_several_prompts(body: dict[str, Any]) -> bool:
    prompt = body.get("prompt")
    # Embeddings have no token ids, so P and D could not compare their prompts.
    if body.get("prompt_embeds") is not None:
        return True
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
