"""Imports that forked peers share. UCX alone takes 0.4 s to load, because it measures the clock of the processor."""

from kvpipe import info
from tests import peers

__all__ = ["peers"]
info()
