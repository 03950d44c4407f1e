"""`kvpipe bench handoff`: real vLLM, through prefill and decode, beside NixlConnector and one undivided instance."""
