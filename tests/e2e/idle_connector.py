"""A second connector for MultiConnector, which offers no KV and keeps none: tests see how vLLM calls two of them."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class IdleConnector(KVConnectorBase_V1):
    """Takes part in every step, without any effect."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Has nothing to wait for."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves nothing."""

    def wait_for_save(self) -> None:
        """Has nothing to wait for."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Offers no token."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Notes nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Tells its workers nothing."""
        return KVConnectorMetadata()
