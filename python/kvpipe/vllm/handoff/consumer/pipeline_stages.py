"""Stages of a producer's pipeline: a rank has the layers of its stage, and a consumer reads each layer from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class PipelineStage:
    """A stage of the producer's pipeline.

    Attributes:
        first_rank: Number of its first worker.
        num_ranks: Ranks of tensor parallelism.
        layers: The layers that it has, as a slice of those of each KV cache group.
    """

    first_rank: int
    num_ranks: int
    layers: tuple[slice, ...]


def pipeline_stages(
    stages: Sequence[Sequence[int]], num_workers: int, num_layers: Sequence[int]
) -> list[PipelineStage]:
    """Returns the stages of a producer.

    Args:
        stages: For each stage, the number of layers of each KV cache group; empty if there is one.
        num_workers: Workers of the producer.
        num_layers: Layers of each group here.

    Raises:
        ConfigError: The stages have other layers than this engine, or different numbers of workers.
    """
    stages = stages or [num_layers]
    num_ranks = num_workers // len(stages)
    if difference := _difference(stages, num_workers, num_layers):
        message = f"the producer has {len(stages)} pipeline stages {difference}; give both engines one model and vLLM"
        raise ConfigError(message)
    found, ends = [], [0] * len(num_layers)
    for index, stage in enumerate(stages):
        layers = tuple(slice(end, end + count) for end, count in zip(ends, stage, strict=True))
        found.append(PipelineStage(index * num_ranks, num_ranks, layers))
        ends = [each.stop for each in layers]
    return found


def _difference(stages: Sequence[Sequence[int]], num_workers: int, num_layers: Sequence[int]) -> str:
    if num_workers % len(stages):
        return f"and {num_workers} workers"
    if others := [len(stage) for stage in stages if len(stage) != len(num_layers)]:
        return f"with {others[0]} KV cache groups, and there are {len(num_layers)} here"
    for index, num in enumerate(num_layers):
        num_theirs = sum(stage[index] for stage in stages)
        if num_theirs != num:
            return f"with {num_theirs} layers of KV cache group {index}, and there are {num} here"
    return ""
