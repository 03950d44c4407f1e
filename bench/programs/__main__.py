"""Runs one program in one role, until its stdin ends."""

import sys

from .side import main

sys.exit(main(sys.argv[1:]))
