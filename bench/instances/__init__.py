"""Real vLLM instances for benchmarks: a model, servers, command lines."""
