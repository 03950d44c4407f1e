"""The connector's facade: what it refuses of an engine, and what it tells the worker role of it."""

from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from kvpipe.connector import KVPipeConnector
from kvpipe.exceptions import ConfigError
from tests.connector.engine import cache_config, engine_config
from tests.connector.test_worker import caches

pytestmark = pytest.mark.vllm

SHAPE = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
FULL, SLIDING = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=64)


def test_the_worker_of_an_engine_that_may_sleep_uses_checksums_though_validation_is_set(
    tiny_model: str, log: pytest.LogCaptureFixture
) -> None:
    config = engine_config(tiny_model, integrity="validate")
    config.model_config.enable_sleep_mode = True
    connector = KVPipeConnector(config, KVConnectorRole.WORKER, cache_config())
    connector.register_kv_caches(caches())
    assert "integrity.fallback checksums instead of validation: sleep mode" in log.text
    connector.shutdown()


@pytest.mark.parametrize("specs", [[SLIDING], [FULL, FULL], []], ids=["sliding window", "two groups", "none"])
@pytest.mark.parametrize("role", KVConnectorRole)
def test_a_cache_in_which_a_token_may_have_no_block_or_several_is_refused(
    config: Any, specs: list[Any], role: KVConnectorRole
) -> None:
    groups = [KVCacheGroupSpec(["layer"], spec) for spec in specs]
    kv_cache_config = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    with pytest.raises(ConfigError, match="model unsupported: kvpipe needs one KV cache group of full attention"):
        KVPipeConnector(config, role, kv_cache_config)
