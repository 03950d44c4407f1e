"""The vLLM V1 connector over a KV store: `kv_connector_module_path: kvpipe.store_connector`."""

from kvpipe.vllm.store.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
