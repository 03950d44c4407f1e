"""Measurements that users can repeat: `kvpipe bench SUBJECT`."""
