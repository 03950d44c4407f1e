"""The extras that users install, and commands that need each, which have no other work to do where it is there."""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

# Each fails with an error of its own as soon as it has all its packages: a bad instance, no vLLM, no broker.
COMMANDS = {
    "proxy": [("proxy", "--prefill", "nonsense", "--decode", "http://127.0.0.1:1"), ("up", "MODEL")],
    "amqp": [
        ("front", "--prefill", "http://127.0.0.1:1,127.0.0.1:2"),
        ("worker", "--decode", "http://127.0.0.1:1"),
        ("queue", "show"),
    ],
}


def distributions(extra):
    """Returns the distributions that an extra names itself, without its own extras."""
    names = [re.match(r"[\w-]+", requirement)[0] for requirement in EXTRAS[extra]]
    return [name for name in names if name != PROJECT["name"]]
