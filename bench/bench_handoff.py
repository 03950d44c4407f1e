"""Real vLLM through prefill and decode: the same as `kvpipe bench handoff`, with its options."""

import sys

from kvpipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "handoff", *sys.argv[1:]]))
