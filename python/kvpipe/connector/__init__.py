"""The vLLM V1 KV connector: `kv_connector_module_path: kvpipe.connector`, `kv_connector: KVPipeConnector`."""

from kvpipe.connector.connector import KVPipeConnector
from kvpipe.connector.continuing import ContinuingScheduler

__all__ = ["ContinuingScheduler", "KVPipeConnector"]
