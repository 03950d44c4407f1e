"""The groups of instances that are compared: P, D and one undivided instance each, which differ in vLLM's settings."""

import dataclasses
import json
from collections.abc import Mapping

TOKEN = "the token of the check"  # noqa: S105 - of processes on loopback that end with this one
LEASE_S = 15
V1, V2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
# FlashInfer is not there, and nothing can be fetched.
ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
# torch.compile starts as many processes as there are cores, in each of many engines.
ENV |= {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
# A machine without a network may have a name that nothing resolves.
ENV |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
# Many instances share a GPU and start at once. vLLM's own measurement of free memory would see those of the others.
MEMORY = ("--gpu-memory-utilization", "0.06", "--kv-cache-memory-bytes")
# Long prompts take several steps, so that blocks are announced while prefill computes.
TINY = ("--max-model-len", "4096", "--max-num-batched-tokens", "512", "--max-num-seqs", "16", *MEMORY, str(256 << 20))
EAGER = ("--enforce-eager",)
FLOAT32 = ("--dtype", "float32", "--attention-backend", "TRITON_ATTN")
BFLOAT16 = ("--dtype", "bfloat16", "--attention-backend", "FLASH_ATTN")


def _graphs(**more: object) -> tuple[str, str]:
    return "--compilation-config", json.dumps(more | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16]})


@dataclasses.dataclass(frozen=True)
class Group:
    """A group.

    Attributes:
        args: vLLM's arguments.
        env: Variables beyond those of every group.
        is_exact: True if its answers have to be those of the undivided instance; bfloat16 rounds by batch.
        has_deaths: True if P and D are killed at the end.
    """

    args: tuple[str, ...]
    env: Mapping[str, str]
    is_exact: bool = False
    has_deaths: bool = False

    @property
    def uses_v2(self) -> bool:
        """True if vLLM's model runner is V2, its default on a GPU."""
        return self.env.get("VLLM_USE_V2_MODEL_RUNNER") != "0"

    def on_cpu(self) -> "Group":
        """The same for vLLM's CPU build, as far as it has it: to rehearse without a GPU."""
        # Whole prompts in one step: vLLM on CPU dies of a seeded request that is computed in several.
        length = ("--max-model-len", "4096", "--max-num-batched-tokens", "4096")
        weights = ("--load-format", "dummy") if "dummy" in self.args else ()
        args = ("--dtype", "float32", "--enforce-eager", *length, *weights)
        env = {"OMP_NUM_THREADS": "1"}
        return dataclasses.replace(self, args=args, env=env, is_exact=True)


# D has kvpipe's scheduler, as `kvpipe up` starts it. V1 runs with asynchronous scheduling and without.
GROUPS = {
    "bfloat16-v1": Group((*TINY, *BFLOAT16, *EAGER, "--no-async-scheduling"), V1),
    "bfloat16-v2": Group((*TINY, *BFLOAT16, *EAGER), V2),
    "float32-v1": Group((*TINY, *FLOAT32, *EAGER), V1, is_exact=True),
    "float32-v2": Group((*TINY, *FLOAT32, *EAGER), V2, is_exact=True, has_deaths=True),
    "full-graphs": Group((*TINY, *FLOAT32, *_graphs(mode=0, cudagraph_mode="FULL")), V2, is_exact=True),
    "piecewise-graphs": Group((*TINY, *FLOAT32, *_graphs(cudagraph_mode="PIECEWISE")), V2, is_exact=True),
    "default-graphs": Group((*TINY, *BFLOAT16), {}),
}
# 1B: the shape of Llama 3.2 1B, 32 KiB of KV for each token; its weights are vLLM's own. All else is as users get it.
SHAPE_ARGS = ("--load-format", "dummy", "--max-model-len", "8192", "--dtype", "bfloat16", "--max-num-seqs", "64")
SHAPE_MEMORY = ("--gpu-memory-utilization", "0.25", "--kv-cache-memory-bytes", str(8 << 30))
# Its vocabulary is smaller than Llama's, because each word has to be in the tokenizer.
SHAPE_FIELDS = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPE_FIELDS |= {"head_dim": 64, "vocab_size": 32_000, "tie_word_embeddings": True}
SHAPES = {
    "shape-eager": Group((*SHAPE_ARGS, *SHAPE_MEMORY, *EAGER), {}),
    "shape": Group((*SHAPE_ARGS, *SHAPE_MEMORY), {}),
}
