"""Many requests at once to real vLLM: the same as `kvpipe bench serving`, with its options."""

import sys

from kvpipe.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", "serving", *sys.argv[1:]]))
