"""Stands in for a torch that has a context of CUDA, for which there must be a GPU."""

import sys
from types import SimpleNamespace

sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))
