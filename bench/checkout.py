"""The checkout that the harness is part of; no wheel has it."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_path(*before: str) -> str:
    """`PYTHONPATH` of a process that imports this package, behind the folders in `before`."""
    return os.pathsep.join(filter(None, [*before, str(ROOT), os.environ.get("PYTHONPATH")]))
