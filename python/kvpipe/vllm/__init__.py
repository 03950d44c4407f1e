"""vLLM connectors: what `KVPipeConnector` (`handoff`) and `KVStoreConnector` (`store`) share."""
