"""The worker role under the V2 model runner's own calls, which come at other times than V1's."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.gpu import kv_connector

from kvpipe.connector import KVPipeConnector
from kvpipe.vllm.handoff.metadata import ReadyRange, StepMetadata
from kvpipe.vllm.handoff.worker import WorkerRole
from tests.vllm.handoff.test_scheduler import until
from tests.vllm.handoff.test_worker import BLOCKS, LAYERS, NAMES, Pair, Recorded, received, role

pytestmark = pytest.mark.vllm


class RunnerPair(Pair):
    """A producer behind what calls connectors in the V2 model runner, and a consumer's worker."""

    def __init__(self, config: VllmConfig, patch: pytest.MonkeyPatch) -> None:
        spec = FullAttentionSpec(block_size=32, num_kv_heads=4, head_size=32, dtype=torch.float32)
        groups = [KVCacheGroupSpec(NAMES, spec)]
        cache = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)
        self.connector = KVPipeConnector(config, KVConnectorRole.WORKER, cache)
        super().__init__()
        patch.setattr(kv_connector, "get_kv_transfer_group", lambda: self.connector)
        patch.setattr(self.connector, "register_kv_caches", lambda caches: None)  # the pair has done so
        self.runner = kv_connector.ActiveKVConnector(config, self.source)

    def role(self, side: str, trace: str = "") -> WorkerRole:
        return self.connector._of_worker() if side == "producer" else super().role(side, trace)

    def begin_forward(self, **step: Any) -> None:
        metadata = StepMetadata(ready=[ReadyRange(self.handoff, 0, [2, 3])], **step)
        self.runner.pre_forward(SimpleNamespace(kv_connector_metadata=metadata, has_sync_kv_loads=False))


@pytest.fixture
def pair(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunnerPair]:
    pair = RunnerPair(config, monkeypatch)
    yield pair
    pair.producer.close()
    pair.consumer.close()


def test_layers_are_announced_during_the_forward_pass(pair: RunnerPair) -> None:
    pair.load([5, 4])
    pair.begin_forward()
    for layer, name in enumerate(NAMES):
        pair.connector.save_kv_layer(name, pair.source[name], None)
        until(lambda done=layer + 1: pair.arrived([2, 3], [5, 4], range(done)))
    assert received(pair.consumer) == {"consuming"}


def test_layers_without_a_hook_are_announced_before_sampling(pair: RunnerPair) -> None:
    """In a CUDA graph of the whole model no hook is called."""
    pair.load([5, 4])
    pair.begin_forward()
    pair.runner.finish_forward()
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2, 3], [5, 4])
    pair.runner.post_forward(set())


def test_a_restored_block_has_its_bytes_before_sampling(pair: RunnerPair) -> None:
    before = {name: pair.source[name].clone() for name in NAMES}
    pair.begin_forward(restores=[(0, 9)])
    for cache in pair.source.values():
        cache[9] += 1
    pair.runner.finish_forward()
    assert all(torch.equal(pair.source[name], before[name]) for name in NAMES)


def test_a_step_is_ended_once_whichever_hooks_the_runner_calls(pair: RunnerPair) -> None:
    pair.load([5, 4])
    pair.begin_forward(restores=[(0, 9)])
    pair.runner.finish_forward()
    pair.source["layer.0"][9] += 1
    expected = pair.source["layer.0"].clone()
    pair.runner.post_forward(set())
    assert torch.equal(pair.source["layer.0"], expected)
    assert received(pair.consumer) == {"consuming"}


@pytest.mark.parametrize("settings", [{"speculative": object()}, {"use_ubatching": True}], ids=["draft", "ubatching"])
def test_layers_that_are_computed_after_the_models_own_are_announced_with_them(settings: dict[str, Any]) -> None:
    class SlowPair(Pair):
        def role(self, side: str, trace: str = "") -> WorkerRole:
            return role(trace=trace, **(settings if side == "producer" else {}))

    pair = SlowPair()
    pair.load([5, 4])
    pair.begin_step([2, 3])
    recorded = Recorded(pair.producer)
    pair.producer.finish_layers()
    assert recorded.num_layers == []
    pair.source[f"layer.{LAYERS - 1}"][[2, 3]] = 7.0
    pair.producer.end_forward()
    assert received(pair.consumer) == {"consuming"}
    assert pair.arrived([2, 3], [5, 4])
    pair.producer.close()
    pair.consumer.close()
