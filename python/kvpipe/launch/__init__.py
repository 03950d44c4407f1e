"""Starts vLLM instances and the proxy on one machine, watches them and ends them.

`kvpipe.launch.deployment` has the API; it needs the extra `proxy`, which is why nothing is imported here.
"""
