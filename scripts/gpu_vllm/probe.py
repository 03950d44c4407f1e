"""The first step on a GPU: what is there, whether each of vLLM's extensions loads, and whether its kernels compute.

python -m gpu_vllm.probe --json FILE
"""

import argparse
import importlib
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

EXTENSIONS = (
    "vllm._C_stable_libtorch",
    "vllm.vllm_flash_attn._vllm_fa3_C",
    "vllm.cumem_allocator",
    "vllm.spinloop",
    "vllm.fs_io_C",
)
_PROGRAMS = (["nvidia-smi"], [sys.executable, "-m", "pip", "list"], ["gcc", "--version"])


def main(arguments: Sequence[str]) -> int:
    """Checks one thing after the other, and writes the findings; 0 if all are as they should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    found: dict[str, Any] = {"python": platform.python_version(), "wrong": []}
    checks: list[tuple[str, Callable[[], object]]] = [("machine", _machine), ("kvpipe", _kvpipe)]
    checks += [(name, partial(_load, name)) for name in EXTENSIONS]
    checks += [
        ("rms_norm", _rms_norm),
        ("silu_and_mul", _silu_and_mul),
        ("FlashAttention 3", _flash_attention),
        ("Triton", _triton),
    ]
    for name, check in checks:
        began = time.monotonic()
        try:
            found[name] = check()
        except Exception as error:  # noqa: BLE001 - each check is on its own
            traceback.print_exc()
            found["wrong"].append(f"{name}: {type(error).__name__}: {error}"[:1500])
        print(f"{name}: {found.get(name, 'failed')} ({time.monotonic() - began:.1f} s)", flush=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for command in _PROGRAMS:
        _show(command)
    return 1 if found["wrong"] else 0


def _show(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=False, timeout=30)  # noqa: S603 - the programs above
    except (OSError, subprocess.SubprocessError) as error:
        print(f"{command[0]}: {error}")
    sys.stdout.flush()


def _load(name: str) -> str:
    return importlib.import_module(name).__name__


def _machine() -> dict[str, Any]:
    import torch  # noqa: PLC0415 - what it lacks is a finding

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, check=False, capture_output=True, text=True, timeout=30)  # noqa: S603
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "driver": driver.stdout.strip(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _kvpipe() -> dict[str, str]:
    from kvpipe import info  # noqa: PLC0415

    found = {key: str(value) for key, value in info().items()}
    if found.get("ucx_has_cuda") != "True":
        raise RuntimeError(f"this UCX has no CUDA: {found}")
    return found


def _rms_norm() -> float:
    import torch  # noqa: PLC0415
    from vllm import _custom_ops  # noqa: PLC0415

    worst = 0.0
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        values = torch.randn(64, 2048, device="cuda", dtype=dtype)
        weight = torch.randn(2048, device="cuda", dtype=dtype)
        out = torch.empty_like(values)
        _custom_ops.rms_norm(out, values, weight, 1e-6)
        wide = values.float()
        expected = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * weight.float()
        worst = max(worst, _differ(out, expected, tolerance))
    return worst


def _silu_and_mul() -> float:
    import torch  # noqa: PLC0415

    values = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(64, 2048, device="cuda", dtype=torch.bfloat16)
    torch.ops._C.silu_and_mul(out, values)  # noqa: SLF001 - the name of vLLM's operators
    gate, up = values.float().chunk(2, dim=-1)
    return _differ(out, torch.nn.functional.silu(gate) * up, 2e-2)


def _flash_attention() -> float:
    import torch  # noqa: PLC0415
    from vllm.vllm_flash_attn import flash_attn_varlen_func  # noqa: PLC0415

    length, worst = 300, 0.0
    for heads, kv_heads, width in ((32, 8, 64), (8, 4, 32)):
        query, key, value = (
            torch.randn(length, number, width, device="cuda", dtype=torch.bfloat16)
            for number in (heads, kv_heads, kv_heads)
        )
        starts = torch.tensor([0, length], device="cuda", dtype=torch.int32)
        lengths = {"max_seqlen_q": length, "cu_seqlens_q": starts, "max_seqlen_k": length, "cu_seqlens_k": starts}
        out = flash_attn_varlen_func(query, key, value, **lengths, causal=True, fa_version=3)
        one, two, three = (each.float().transpose(0, 1)[None] for each in (query, key, value))
        options = {"is_causal": True, "enable_gqa": True}
        expected = torch.nn.functional.scaled_dot_product_attention(one, two, three, **options)[0].transpose(0, 1)
        worst = max(worst, _differ(out, expected, 3e-2))
    return worst


def _triton() -> str:
    import torch  # noqa: PLC0415
    from vllm.v1.sample.ops import topk_topp_triton  # noqa: PLC0415

    logits, fives = torch.randn(4, 2048, device="cuda"), torch.full((4,), 5, device="cuda", dtype=torch.int32)
    kept = topk_topp_triton.apply_top_k_top_p_triton(logits.clone(), fives, None)
    counts = (kept > float("-inf")).sum(-1).tolist()
    if counts != [5] * 4:
        raise RuntimeError(f"top 5 keeps {counts} tokens")
    return "top k keeps 5 tokens"


def _differ(out: Any, expected: Any, tolerance: float) -> float:
    """The largest difference, relative to the largest value.

    Raises:
        RuntimeError: It is over the tolerance.
    """
    difference = float((out.float() - expected.float()).abs().max() / expected.float().abs().max())
    if not difference <= tolerance:
        raise RuntimeError(f"differs by {difference:.2e}, more than {tolerance}")
    return difference


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
