"""Real vLLM on a GPU without a network: what is packed for it, and what runs there (`gpu-check --vllm`)."""
