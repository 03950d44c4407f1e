"""Selects instances for a request. Pure: no input or output, no clock."""

import math
from collections.abc import Callable, Sequence
from typing import Any

from kvpipe.proxy.bodies import COMPLETIONS_PATH
from kvpipe.proxy.instances import Instance


class RoundRobin:
    """Gives each request the next instance, and the others after it in case that one fails.

    The instances may change from one request to the next.

    Args:
        num_partners: number of the instances of the other role, which are taken in turn by the same requests. Two turns
            in step would use two of the four pairs of 2 P and 2 D; with this argument all pairs are used alike.
    """

    def __init__(self, num_partners: Callable[[], int] = lambda: 0) -> None:
        self._num_partners = num_partners
        self._num_requests = 0

    def order(self, instances: Sequence[Instance], is_avoided: Callable[[Instance], bool]) -> list[Instance]:
        """All instances, the next one first; those that are avoided come last, so that they use up few retries.

        Other servers come before the other ranks of the first one's server, which often fail together.
        """
        start = self._start(len(instances))
        self._num_requests += 1
        first, *others = [*instances[start:], *instances[:start]]
        others.sort(key=lambda instance: instance.url == first.url)
        return sorted([first, *others], key=is_avoided)

    def _start(self, num_instances: int) -> int:
        # Requests after which both turns are where they began.
        period = math.lcm(num_instances, self._num_partners()) or math.inf
        return (self._num_requests + int(self._num_requests // period)) % num_instances


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


def num_choices(body: dict[str, Any], path: str) -> int:
    """Returns the number of choices of a complete answer; 0 if only vLLM knows."""
    n, prompt = body.get("n"), body.get("prompt")
    if body.get("use_beam_search") or body.get("best_of") not in (None, 1) or body.get("prompt_embeds") is not None:
        return 0
    if n is not None and not isinstance(n, int):
        return 0
    if path == COMPLETIONS_PATH and isinstance(prompt, list) and _has_several_prompts(body):
        return (n or 1) * len(prompt)
    return n or 1


def _has_several_prompts(body: dict[str, Any]) -> bool:
    prompt = body.get("prompt")
    # Embeddings have no token ids, so P and D could not compare their prompts.
    if body.get("prompt_embeds") is not None:
        return True
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
