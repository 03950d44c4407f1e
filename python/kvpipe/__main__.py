"""`python -m kvpipe` is the command `kvpipe`."""

import sys

from kvpipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
