"""Benchmarks that users can repeat in a checkout: `kvpipe bench NAME`."""
