"""`kvpipe bench serving`: many requests at once, real vLLM."""
