"""Entry point of the group `vllm.general_plugins`: vLLM then finds kvpipe's connectors by name alone."""

_CONNECTORS = {"KVPipeConnector": "kvpipe.connector", "KVStoreConnector": "kvpipe.store_connector"}


def register() -> None:
    """Registers kvpipe's connectors; vLLM calls this in each of its processes, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - vLLM is there when it calls
        KVConnectorFactory,
    )

    for name, module in _CONNECTORS.items():
        if name not in KVConnectorFactory._registry:  # noqa: SLF001 - there is no public question
            KVConnectorFactory.register_connector(name, module, name)
