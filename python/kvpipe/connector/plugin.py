"""Entry point of the group `vllm.general_plugins`: vLLM then finds the connector by name alone."""


def register() -> None:
    """Registers `KVPipeConnector`; vLLM calls this in each of its processes, possibly more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import (  # noqa: PLC0415 - vLLM is there when it calls
        KVConnectorFactory,
    )

    if "KVPipeConnector" not in KVConnectorFactory._registry:  # noqa: SLF001 - there is no public question
        KVConnectorFactory.register_connector("KVPipeConnector", "kvpipe.connector", "KVPipeConnector")
