"""NixlConnector with a trace: subclasses that vLLM loads by module path.

They write events in the same hooks as kvpipe's connector, with the same names, so that both are measured alike. The 32
hex digits of the client's `X-Request-Id`, which vLLM includes in its request ids, are the id of the handoff.
"""

from __future__ import annotations

import os
import re
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

from kvpipe import _kvpipe

_ID = re.compile("[0-9a-f]{32}")


def _handoff(request_id: str) -> bytes | None:
    found = _ID.search(request_id)
    return bytes.fromhex(found[0]) if found else None


class _Traced:
    """A mixin that writes trace events before it calls NIXL's class."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)  # type: ignore[call-arg]
        self._trace = _kvpipe.Trace(os.environ["KVPIPE_TRACE"], f"nixl {role.name.lower()} {os.getpid()}")
        self._unscheduled: set[str] = set()

    def _event(self, name: str, request_id: str) -> None:
        if (handoff := _handoff(request_id)) is not None:
            self._trace.instant(name, handoff)

    def _sampled(self, request: Any) -> None:
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            self._event("sampled", request.request_id)

    # --- scheduler role

    def on_new_request(self, request: Any) -> None:
        self._event("queued", request.request_id)
        super().on_new_request(request)  # type: ignore[misc]

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._event("admitted", request.request_id)
            self._unscheduled.add(request.request_id)
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[misc]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        first = self._unscheduled & scheduler_output.num_scheduled_tokens.keys()
        self._unscheduled -= first
        for request_id in first:
            self._event("scheduled", request_id)
        metadata = super().build_connector_meta(scheduler_output)  # type: ignore[misc]
        # pickled with the metadata for the worker
        metadata.first_steps = sorted(first)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        for request_id in connector_output.finished_recving or ():
            self._event("received", request_id)
        super().update_connector_output(connector_output)  # type: ignore[misc]

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._sampled(request)
        return super().request_finished(request, block_ids)  # type: ignore[misc]

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._sampled(request)
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[misc]

    # --- worker role

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        for request_id in connector_metadata.reqs_to_recv:
            self._event("load", request_id)
        for request_id in connector_metadata.first_steps:
            self._event("first step", request_id)
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        for request_id in results.finished_recving:
            self._event("loaded", request_id)
        return results


class NixlPullConnector(_Traced, nixl.NixlPullConnector):  # type: ignore[misc]
    """Decode reads."""


class NixlPushConnector(_Traced, nixl.NixlPushConnector):  # type: ignore[misc]
    """Prefill writes."""
