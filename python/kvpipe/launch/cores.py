"""The cores that an instance's worker is pinned to."""

import itertools
import os
from collections.abc import Mapping, Sequence

from kvpipe.exceptions import ConfigError

# vLLM's CPU build starts an OMP thread for each core of this list, and pins it there. It reserves cores for its other
# processes, and one more beside a connector, only where it chooses cores itself (0.32, utils/ompmultiprocessing.py).
BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"

Cores = tuple[int, ...]


def assign_cores(num_instances: int, omp_threads: int | None, env: Mapping[str, str]) -> list[Cores]:
    """Deals out the cores that this process may use to instances in turn; they share cores where there are too few.

    Args:
        num_instances: Each has one worker.
        omp_threads: Cores of each worker; with None, none is pinned.
        env: The user's environment.

    Raises:
        ConfigError: One worker's threads need more cores than there are, or the user has bound the threads otherwise.
    """
    if omp_threads is None:
        return [()] * num_instances
    if BIND_VARIABLE in env:
        raise ConfigError(
            f"omp_threads={omp_threads} and {BIND_VARIABLE}={env[BIND_VARIABLE]!r} both choose cores; unset one of them"
        )
    allowed = sorted(os.sched_getaffinity(0))
    if omp_threads > len(allowed):
        remedy = f"use at most {len(allowed)}"
        raise ConfigError(f"omp_threads={omp_threads}: this process may use {counted(len(allowed), 'core')}; {remedy}")
    dealt = itertools.cycle(allowed)
    return [tuple(sorted(itertools.islice(dealt, omp_threads))) for _ in range(num_instances)]


def sharing_text(assigned: Sequence[Cores]) -> str:
    """Says which workers compete for cores; empty if none do."""
    num_threads, num_cores = sum(map(len, assigned)), len(set(itertools.chain(*assigned)))
    if num_threads == num_cores:
        return ""
    threads = counted(num_threads, "OMP thread")
    return f"{len(assigned)} instances share {counted(num_cores, 'core')}: {threads} in all"


def counted(number: int, noun: str) -> str:
    """A number and its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
