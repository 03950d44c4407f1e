"""scripts/gpu-check --vllm: packing, steps, report, and the whole with stand-ins for vLLM's engines."""
