"""Versions of vLLM: which are refused, which are warned of, and what differs between those that are supported."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from kvpipe.connector import KVPipeConnector
from kvpipe.exceptions import ConfigError
from kvpipe.launch.spec import VLLM_COMMAND
from kvpipe.store_connector import KVStoreConnector
from kvpipe.vllm.handoff.metadata import WorkerOutcomes
from kvpipe.vllm.versions import LoadedFirst, check_version, is_watermarked

pytestmark = pytest.mark.vllm


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the version of the vLLM that runs."""
    return lambda version: monkeypatch.setattr("vllm.__version__", version)


def test_a_vllm_without_the_hooks_is_refused_by_its_version_with_those_that_have_them(
    running: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(KVConnectorBase_V1, "bind_kv_cache_manager")
    running("0.29.0+cpu")
    with pytest.raises(ConfigError, match=r"vLLM 0\.29\.0\+cpu is too old.*install vLLM 0\.30 or newer"):
        check_version()


@pytest.mark.parametrize("version", ["0.34.0", "0.99.1+cpu", "1.0.0"])
def test_a_vllm_outside_the_tested_range_is_warned_of_with_both_versions(
    running: Any, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    running(version)
    check_version()
    assert caplog.text.count(f"tested with vLLM 0.30 to 0.33, this is {version}") == 1


@pytest.mark.parametrize("version", ["0.30.0", "0.31.2", "0.32.0", "0.32.1+cpu", "0.33.0"])
def test_a_vllm_of_the_tested_range_is_not_warned_of(
    running: Any, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    running(version)
    check_version()
    assert not caplog.text


def test_the_vllm_that_runs_is_of_the_tested_range(caplog: pytest.LogCaptureFixture) -> None:
    check_version()
    assert not caplog.text


@pytest.mark.parametrize("connector", [KVPipeConnector, KVStoreConnector])
def test_no_connector_claims_to_follow_a_cache_through_sleep_mode(connector: Any) -> None:
    assert connector.supports_sleep_mode(None) is False


@pytest.mark.skipif(
    not hasattr(KVOutputAggregator, "ft_defer_kv_connector_outputs"), reason="vLLM 0.32 and older replay no reports"
)
def test_reports_that_0_33_replays_after_a_worker_has_failed_are_joined_with_those_of_the_step() -> None:
    def report(*handoffs: bytes) -> KVConnectorOutput:
        return KVConnectorOutput(kv_connector_worker_meta=WorkerOutcomes(acknowledged=list(handoffs)))

    def output(*handoffs: bytes) -> ModelRunnerOutput:
        return ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=report(*handoffs))

    aggregator = KVOutputAggregator(2)
    aggregator.ft_defer_kv_connector_outputs([report(b"1"), None])
    joined = aggregator.aggregate([output(b"1"), output(b"2")])
    assert joined.kv_connector_output.kv_connector_worker_meta.acknowledged == [b"1", b"2"]


def watermarkings() -> Iterator[tuple[object, dict[str, Any], bool]]:
    """Yields an engine's setting, those of a request, and true if its tokens have a watermark."""
    for config in (None, "watermark"):
        yield config, {"watermarking": True}, config is not None
        yield config, {"watermarking": False}, False
        yield config, {}, config is not None


@pytest.mark.parametrize(("config", "more", "expected"), list(watermarkings()))
def test_tokens_have_a_watermark_where_the_engine_has_one_and_the_request_does_not_refuse_it(
    config: object, more: dict[str, Any], *, expected: bool
) -> None:
    engine: Any = SimpleNamespace(watermark_config=config)
    assert is_watermarked(engine, SamplingParams(**more)) is expected


def test_a_vllm_that_knows_no_watermarks_has_none() -> None:
    engine: Any = SimpleNamespace()
    params: Any = SimpleNamespace()
    assert not is_watermarked(engine, params)


def request(name: str) -> Any:
    return SimpleNamespace(request_id=name)


def step(*names: str) -> Any:
    """A step that schedules these requests."""
    return SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))


def after_a_stuck_step(loads: LoadedFirst) -> LoadedFirst:
    """One request is loaded, another is not, and neither has run."""
    loads.claimed(request("loaded"))
    loads.loaded({"loaded", "of another connector"})
    assert not loads.is_deferred(request("other"))
    loads.scheduled(step())
    return loads


def test_in_0_30_a_request_without_blocks_is_deferred_after_a_step_in_which_nothing_ran(running: Any) -> None:
    running("0.30.0")
    loads = after_a_stuck_step(LoadedFirst())
    assert loads.is_deferred(request("other"))
    loads.scheduled(step("loaded"))
    assert not loads.is_deferred(request("other"))
    loads.scheduled(step())
    assert not loads.is_deferred(request("other"))


def test_in_0_30_no_request_is_deferred_for_ever(running: Any) -> None:
    running("0.30.0")
    loads = after_a_stuck_step(LoadedFirst())
    loads.scheduled(step())
    assert not loads.is_deferred(request("other"))
    assert after_a_stuck_step(LoadedFirst()).is_deferred(request("loaded")) is False, "it has lost its blocks"


def test_in_0_30_a_load_that_ends_after_its_request_defers_none(running: Any) -> None:
    running("0.30.0")
    loads = LoadedFirst()
    loads.claimed(request("aborted"))
    loads.finished(request("aborted"))
    loads.loaded({"aborted"})
    loads.scheduled(step())
    assert not loads.is_deferred(request("other"))


def test_from_0_31_on_no_request_is_deferred(running: Any) -> None:
    running("0.31.0")
    assert not after_a_stuck_step(LoadedFirst()).is_deferred(request("other"))


def test_kvpipe_up_starts_each_vllm_by_a_module_that_is_there_runs_and_is_not_deprecated() -> None:
    _, flag, module = VLLM_COMMAND
    assert flag == "-m"
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert any(isinstance(part, ast.If) and "__main__" in ast.unparse(part.test) for part in ast.parse(source).body)
    assert "DeprecationWarning" not in source
