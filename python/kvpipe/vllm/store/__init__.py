"""`KVStoreConnector`: saves the KV of prompts in a store, and loads what is stored."""
