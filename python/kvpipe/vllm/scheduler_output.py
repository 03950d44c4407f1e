"""Requests and blocks of a step, read from vLLM's scheduler output."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


def scheduled(output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """Yields `(request_id, tokens computed before, tokens of this step)` for each scheduled request."""
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, counts.get(new.req_id, 0)
    cached = output.scheduled_cached_reqs
    for request_id, num_before in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, num_before, counts.get(request_id, 0)


def output_position(request: Request) -> int:
    """Returns the position of the output that a scheduled request samples next.

    With asynchronous scheduling the outputs of the steps before may not be known yet: they are placeholders.
    """
    position: int = request.num_output_tokens + request.num_output_placeholders
    return position
