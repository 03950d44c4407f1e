"""One engine of vLLM in this process, eager, beside transformers' own model: the same greedy tokens.

python -m gpu_vllm.engine GROUP --model FOLDER --json FILE
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_vllm.groups import ENV, GROUPS
from gpu_vllm.instances import prompt, say

_LENGTHS, _NUM_TOKENS = (11, 128, 600, 1500), 16


def main(arguments: Sequence[str]) -> int:
    """Generates by both, and writes the findings; 0 if a float32 engine's tokens are those of transformers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group", choices=GROUPS)
    for option in ("--model", "--json"):
        parser.add_argument(option, type=Path, required=True)
    parser.add_argument("--cpu", action="store_true")
    options = parser.parse_args(arguments)
    group = GROUPS[options.group].on_cpu() if options.cpu else GROUPS[options.group]
    # vLLM reads these when it is imported.
    os.environ.update({**ENV, **group.env, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    found: dict[str, Any] = {"group": options.group, "wrong": []}
    try:
        found |= _generate(options.model, group.args)
        if group.is_exact and found["equal"] < found["asked"]:
            found["wrong"].append(f"{found['asked'] - found['equal']} answers differ from transformers': {found}")
    except Exception as error:  # noqa: BLE001 - whatever it was belongs into the findings
        traceback.print_exc()
        found["wrong"].append(f"{type(error).__name__}: {error}"[:3000])
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    say(str(found))
    return 1 if found["wrong"] else 0


def _generate(model: Path, args: Sequence[str]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams  # noqa: PLC0415 - after the environment
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = EngineArgs.from_cli_args(parser.parse_args(["--model", str(model), *args]))
    began = time.monotonic()
    engine = LLM.from_engine_args(given)
    started = time.monotonic() - began
    say(f"engine started in {started:.1f} s")
    prompts = [prompt(length, 1) for length in _LENGTHS]
    greedy = SamplingParams(temperature=0, max_tokens=_NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate([{"prompt_token_ids": each} for each in prompts], greedy, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    say(f"tokens of the engine: {found}")
    expected = _by_transformers(model, prompts)
    config = engine.llm_engine.vllm_config
    return {
        "start_s": round(started, 1),
        "asked": len(prompts),
        "equal": sum(one == other for one, other in zip(expected, found, strict=True)),
        "equal_tokens": [_num_equal(one, other) for one, other in zip(expected, found, strict=True)],
        "is_v2": bool(config.use_v2_model_runner),
        "is_asynchronous": bool(config.scheduler_config.async_scheduling),
        "backend": str(config.attention_config.backend),
    }


def _by_transformers(model: Path, prompts: Sequence[list[int]]) -> list[list[int]]:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    device = "cuda" if torch.cuda.is_available() else "cpu"
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
    found = []
    for tokens in prompts:
        ids = torch.tensor([tokens], device=device)
        with torch.no_grad():
            for _ in range(_NUM_TOKENS):
                following = reference(ids).logits[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, following], dim=-1)
        found.append(ids[0, len(tokens) :].tolist())
    return found


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((at for at, (mine, theirs) in pairs if mine != theirs), len(one))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
