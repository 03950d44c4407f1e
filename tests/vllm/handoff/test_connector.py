"""The connector's facade: what it refuses of an engine, and what it tells the worker role of it."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)

from kvpipe import info
from kvpipe.connector import KVPipeConnector
from kvpipe.exceptions import ConfigError, TransportUnavailableError
from kvpipe.store_connector import KVStoreConnector
from kvpipe.vllm.handoff.metadata import HandshakeMetadata, StepMetadata, WorkerOutcomes
from tests.vllm.handoff.engine import cache_config, engine_config
from tests.vllm.handoff.test_worker import BLOCKS

pytestmark = pytest.mark.vllm

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL, RING = FullAttentionSpec(**SHAPE), CircularBufferSpec(**SHAPE)
STATE = MambaSpec(block_size=16, shapes=((4, 8),), dtypes=(torch.float32,))


def zeroed() -> KVCacheConfig:
    """A cache whose new blocks vLLM zeroes."""
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate([FULL, STATE])]
    return KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


def test_the_worker_of_an_engine_that_zeroes_blocks_early_uses_checksums_though_validation_is_set(
    tiny_model: str, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(tiny_model, integrity="validate")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    KVPipeConnector(config, KVConnectorRole.WORKER, zeroed())
    assert "integrity.fallback checksums instead of validation: the V2 model runner zeroes" in log.text


@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_cache_whose_blocks_cannot_be_handed_over_is_refused_in_both_roles(
    config: Any, role: KVConnectorRole
) -> None:
    groups = [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate([FULL, RING])]
    kv_cache_config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(ConfigError, match="model unsupported: kvpipe does not hand over KV caches of CircularBufferSp"):
        KVPipeConnector(config, role, kv_cache_config)


def test_an_engine_whose_device_kvpipe_does_not_know_is_refused_by_the_constructor(tiny_model: str) -> None:
    config = engine_config(tiny_model)
    config.device_config.device_type = "xpu"
    message = "KV cache on device xpu: kvpipe moves caches in host memory and on NVIDIA GPUs"
    with pytest.raises(ConfigError, match=re.escape(message)):
        KVPipeConnector(config, KVConnectorRole.WORKER, cache_config())


def test_a_gpu_without_cuda_in_ucx_is_refused_by_the_constructor_with_the_wheels_that_have_it(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if info()["ucx_has_cuda"]:
        pytest.skip("this UCX has CUDA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    config = engine_config(tiny_model)
    config.device_config.device_type = "cuda"
    with pytest.raises(TransportUnavailableError, match=r"pip install 'kvpipe\[ucx-cu12\]' or 'kvpipe\[ucx-cu13\]'"):
        KVPipeConnector(config, KVConnectorRole.WORKER, cache_config())


@pytest.mark.parametrize("connector", [KVPipeConnector, KVStoreConnector])
def test_a_layout_with_the_heads_outermost_is_asked_for_unless_the_kv_is_latent(connector: Any, config: Any) -> None:
    assert connector.get_required_kvcache_layout(config) == "LBHNC"
    latent = SimpleNamespace(model_config=SimpleNamespace(use_mla=True))
    assert connector.get_required_kvcache_layout(latent) is None


def test_vllms_abstract_classes_include_the_connectors_messages() -> None:
    assert issubclass(StepMetadata, KVConnectorMetadata)
    assert issubclass(HandshakeMetadata, KVConnectorHandshakeMetadata)
    assert issubclass(WorkerOutcomes, KVConnectorWorkerMetadata)
