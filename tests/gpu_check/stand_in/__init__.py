"""Stand-ins for vLLM, torch, transformers and tokenizers, as the programs of `gpu-check --vllm` use them.

They compute nothing: a token is a checksum of all tokens before it, at every instance. So the check's own programs, the
proxy and the control ports run as on a GPU. What they cannot show is that vLLM answers correctly there.

The folder is what `gpu-check --vllm` unpacks in place of vLLM. It is first on PYTHONPATH.
"""
