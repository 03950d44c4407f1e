"""The vLLM V1 KV connector: `kv_connector_module_path: kvpipe.connector`, `kv_connector: KVPipeConnector`.

The classes are imported when they are asked for: a worker does without vLLM's scheduler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpipe.vllm.first_token.continuing_scheduler import ContinuingScheduler
    from kvpipe.vllm.handoff.connector import KVPipeConnector

__all__ = ["ContinuingScheduler", "KVPipeConnector"]

_MODULES = {
    "ContinuingScheduler": "kvpipe.vllm.first_token.continuing_scheduler",
    "KVPipeConnector": "kvpipe.vllm.handoff.connector",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(_MODULES[name]), name)
