"""Latency and GB/s of a Pipe beside memcpy: the same as `kvpipe bench pipe`, see there and README.md."""

import sys

from kvpipe.cli import main

sys.exit(main(["bench", "pipe", *sys.argv[1:]]))
