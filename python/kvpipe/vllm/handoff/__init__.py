"""`KVPipeConnector`: moves the KV cache of a request from the engine that computes it to the one that decodes."""
