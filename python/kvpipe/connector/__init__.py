"""The vLLM V1 KV connector: `kv_connector_module_path: kvpipe.connector`, `kv_connector: KVPipeConnector`.

The classes are imported when they are asked for, so that the worker role can be used without vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvpipe.connector.connector import KVPipeConnector
    from kvpipe.connector.continuing import ContinuingScheduler

__all__ = ["ContinuingScheduler", "KVPipeConnector"]

_MODULES = {"KVPipeConnector": "connector", "ContinuingScheduler": "continuing"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
