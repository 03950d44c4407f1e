"""Tensors through a Pipe beside ucx_perftest and memcpy: the same as `kvpipe bench pipe`, with its options."""

import sys

from kvpipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "pipe", *sys.argv[1:]]))
