"""What happens to a request whose KV does not come, and what MultiConnector's own configuration says of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger

from kvpipe.exceptions import ConfigError

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig

logger = init_logger("vllm.kvpipe.policy")

_DEFAULT = "recompute"
_VLLMS_DEFAULT = "fail"
# Connectors of vLLM that read the same parameters of requests.
_SAME_PARAMS = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MoRIIOConnector", "MooncakeConnector")


def load_failure_policy(on_load_failure: str, vllms: str) -> str:
    """Returns `recompute` or `fail`.

    vLLM does not keep whether its `fail` was written or is its default, so that `fail` alone does not count. A request
    that is computed again is answered right.

    Args:
        on_load_failure: The connector's setting; empty: not given.
        vllms: `kv_load_failure_policy`.

    Raises:
        ConfigError: Both are given and differ.
    """
    if not on_load_failure:
        if vllms == _VLLMS_DEFAULT:
            logger.info(
                "config.set kv_load_failure_policy=%s; to have requests fail, write %s into kv_connector_extra_config",
                _DEFAULT,
                '"on_load_failure": "fail"',
            )
            return _DEFAULT
        return vllms
    if vllms not in (_VLLMS_DEFAULT, on_load_failure):
        message = (
            f"on_load_failure={on_load_failure!r} and kv_load_failure_policy={vllms!r} differ; write "
            f'"kv_load_failure_policy": "{vllms}" alone into --kv-transfer-config, without on_load_failure'
        )
        raise ConfigError(message)
    return on_load_failure


def check_parent(
    parent: KVTransferConfig, policy: str, connector: str = "KVPipeConnector", *, is_consumer: bool = False
) -> None:
    """Checks what an engine was configured with, where kvpipe is one of several connectors.

    Args:
        parent: The engine's configuration, of which a connector of MultiConnector gets its own part alone.
        policy: What this connector does about KV that does not come.
        connector: Name of this connector.
        is_consumer: Whether it loads into blocks that vLLM frees only after the steps that write them, if the engine is
            a consumer.

    Raises:
        ConfigError: vLLM would do something else, or another connector reads the same parameters of requests.
    """
    if parent.kv_connector != "MultiConnector":
        return
    reads_params = connector == "KVPipeConnector"
    names = [str(part.get("kv_connector")) for part in parent.kv_connector_extra_config.get("connectors", ())]
    if other := next((name for name in names if reads_params and name in _SAME_PARAMS), ""):
        message = (
            f"MultiConnector has {other} beside KVPipeConnector: both read the same kv_transfer_params, and would "
            "take each other's handoffs; leave one of them"
        )
        raise ConfigError(message)
    if is_consumer and not parent.is_kv_consumer:
        message = (
            f"under MultiConnector vLLM reads kv_role at the top level, where it is {parent.kv_role!r}, and "
            f'{connector} consumes; write "kv_role": "kv_both" beside "kv_connector": "MultiConnector"'
        )
        raise ConfigError(message)
    if parent.kv_load_failure_policy != policy:
        message = (
            f"under MultiConnector vLLM reads kv_load_failure_policy at the top level, where it is "
            f"{parent.kv_load_failure_policy!r}, and {connector} has {policy!r}; write "
            f'"kv_load_failure_policy": "{policy}" beside "kv_connector": "MultiConnector"'
        )
        raise ConfigError(message)
