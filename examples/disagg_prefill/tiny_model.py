"""Makes the tiny model that `kvpipe up` serves without a model's name, for the examples and tests.

python tiny_model.py [FOLDER]
"""

import argparse
import os
from pathlib import Path

from kvpipe.launch import tiny_model

DEFAULT_PATH = Path(__file__).parents[2] / ".cache" / "tiny-model"


def make_tiny_model(path: Path = DEFAULT_PATH) -> Path:
    """Makes the model in `path` unless it is there already, and returns the absolute path."""
    return tiny_model.make_tiny_model(path)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description="Make the tiny model of the examples and tests.")
    parser.add_argument("folder", nargs="?", type=Path, default=DEFAULT_PATH)
    print(make_tiny_model(parser.parse_args().folder))
