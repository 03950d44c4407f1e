"""Versions of vLLM: which are refused, which are warned of, and what differs between those that are supported."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.sampling_params import SamplingParams

from kvpipe.connector import KVPipeConnector
from kvpipe.exceptions import ConfigError
from kvpipe.store_connector import KVStoreConnector
from kvpipe.vllm.versions import check_version, is_watermarked

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


@pytest.mark.parametrize(("version", "num_warnings"), [("0.99.1", 1), ("0.32.0", 0), ("0.32.1+cpu", 0)])
def test_a_vllm_outside_the_tested_range_is_warned_of_with_both_versions(
    running: Any, caplog: pytest.LogCaptureFixture, version: str, num_warnings: int
) -> None:
    running(version)
    check_version()
    assert caplog.text.count("tested with vLLM 0.32.x, this is 0.99.1") == num_warnings


@pytest.mark.parametrize("connector", [KVPipeConnector, KVStoreConnector])
def test_no_connector_claims_to_follow_a_cache_through_sleep_mode(connector: Any) -> None:
    assert connector.supports_sleep_mode(None) is False


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
