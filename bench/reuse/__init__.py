"""Prompts that are asked again: real vLLM with KV in a store, beside vLLM without one."""
