"""The GPUs that an instance runs on, and its share of their memory."""

import dataclasses
import itertools
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence

from kvpipe.exceptions import ConfigError
from kvpipe.launch.arguments import data_parallel_size, tensor_parallel_size, value_of
from kvpipe.launch.cores import counted

# vLLM takes so much of a GPU's memory by default (0.32, config/cache.py:gpu_memory_utilization).
_DEFAULT_UTILIZATION = 0.9
_UTILIZATION_FLAG = "--gpu-memory-utilization"
_KV_CACHE_FLAG = "--kv-cache-memory-bytes"
_QUERY = ("--query-gpu=index,uuid,memory.total,memory.free", "--format=csv,noheader,nounits")
_QUERY_TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True)
class GpuShare:
    """An instance's share of some GPUs.

    Attributes:
        gpus: As `CUDA_VISIBLE_DEVICES` names them; empty if the instance chooses itself.
        utilization: The share of their memory for vLLM; None leaves it to vLLM or to the user's arguments.
    """

    gpus: tuple[str, ...] = ()
    utilization: float | None = None

    @property
    def args(self) -> tuple[str, ...]:
        """Arguments for vLLM."""
        return () if self.utilization is None else (_UTILIZATION_FLAG, str(self.utilization))


@dataclasses.dataclass(frozen=True)
class GpuMemory:
    """Memory of a GPU in MiB, as `nvidia-smi` reports it."""

    total: int
    free: int


def assign_gpus(num_instances: int, gpus: Sequence[str], vllm_args: Sequence[str]) -> list[GpuShare]:
    """Deals out GPUs to instances in turn. Where there are too few, instances share a GPU and its memory.

    Args:
        num_instances: Each takes as many GPUs as its tensor-parallel size times its data-parallel size.
        gpus: As `CUDA_VISIBLE_DEVICES` names them; without any, nothing is assigned.
        vllm_args: vLLM's arguments, the same for every instance.

    Raises:
        ConfigError: A GPU is named twice, or one instance needs more than there are.
    """
    if not gpus:
        return [GpuShare()] * num_instances
    if twice := [gpu for gpu, number in Counter(gpus).items() if number > 1]:
        raise ConfigError(f"gpus={','.join(gpus)}: {twice[0]} is named twice")
    num_ranks, num_groups = tensor_parallel_size(vllm_args), data_parallel_size(vllm_args)
    num_gpus = num_ranks * num_groups
    if num_gpus > len(gpus):
        with_groups = f" and --data-parallel-size {num_groups}" if num_groups > 1 else ""
        raise ConfigError(
            f"gpus={','.join(gpus)}: each instance with --tensor-parallel-size {num_ranks}{with_groups} needs "
            f"{counted(num_gpus, 'GPU')}"
        )
    dealt = itertools.cycle(gpus)
    assigned = [tuple(itertools.islice(dealt, num_gpus)) for _ in range(num_instances)]
    uses = Counter(itertools.chain(*assigned))
    if value_of(vllm_args, (_UTILIZATION_FLAG,)) is not None:
        return [GpuShare(each) for each in assigned]
    return [GpuShare(each, _share(max(uses[gpu] for gpu in each))) for each in assigned]


def start_turns(shares: Sequence[GpuShare], vllm_args: Sequence[str]) -> list[int]:
    """Returns the turn in which each instance starts; those of one turn share no GPU.

    vLLM measures the free memory of its GPU while it starts. It fails, or plans with less, where another process
    allocates or frees memory meanwhile (0.32, v1/worker/gpu_worker.py:determine_available_memory). It does not measure
    if its arguments have the size of the KV cache.
    """
    if value_of(vllm_args, (_KV_CACHE_FLAG,)) is not None:
        return [0] * len(shares)
    turns: list[int] = []
    latest: dict[str, int] = {}
    for share in shares:
        turns.append(max((latest[gpu] + 1 for gpu in share.gpus if gpu in latest), default=0))
        latest |= dict.fromkeys(share.gpus, turns[-1])
    return turns


def _share(num_users: int) -> float | None:
    """The share of each instance, rounded down; None if there is only one, which takes what vLLM takes."""
    return None if num_users == 1 else int(100 * _DEFAULT_UTILIZATION / num_users) / 100


def query_memory() -> dict[str, GpuMemory]:
    """Memory of this machine's GPUs, by index and by UUID; empty where `nvidia-smi` does not tell."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    try:
        ran = subprocess.run(  # noqa: S603 - NVIDIA's own program, by its name
            [program, *_QUERY], capture_output=True, text=True, timeout=_QUERY_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in ran.stdout.splitlines():
        index, *rest = (cell.strip() for cell in line.split(","))
        match rest:
            case [uuid, total, free] if total.isdecimal() and free.isdecimal():
                found[index] = found[uuid] = GpuMemory(int(total), int(free))
    return found


def sharing_text(shares: Sequence[GpuShare], vllm_args: Sequence[str], memory: dict[str, GpuMemory]) -> list[str]:
    """Says which GPUs are shared, and where vLLM will want more memory than is free."""
    lines = []
    users = Counter(itertools.chain(*(share.gpus for share in shares)))
    how = ", started one after the other" if any(start_turns(shares, vllm_args)) else ""
    for gpu, number in users.items():
        share = next(each.utilization for each in shares if gpu in each.gpus)
        wanted = share or float(value_of(vllm_args, (_UTILIZATION_FLAG,)) or _DEFAULT_UTILIZATION)
        if number > 1:
            lines.append(f"{number} instances share GPU {gpu}: {wanted:g} of its memory each{how}")
        if (has := memory.get(gpu)) and number * wanted * has.total > has.free:
            lines.append(
                f"GPU {gpu} is short of memory: {number * wanted * has.total / 1024:.1f} GiB are wanted, "
                f"{has.free / 1024:.1f} of {has.total / 1024:.1f} are free; end what uses it, or give "
                f"{_UTILIZATION_FLAG} after --"
            )
    return lines
