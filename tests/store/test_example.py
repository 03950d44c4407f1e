"""The compose file of examples/store is made of settings that the proxy has."""

from pathlib import Path

import yaml

from kvpipe.proxy import Environment, Instance

FILE = Path(__file__).parents[2] / "examples" / "store" / "compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]


def test_the_proxy_knows_its_instances(tmp_path):
    found = Environment.read(SERVICES["proxy"]["environment"], tmp_path / ".env")
    assert found.prefill == (Instance("http://prefill:8000"),)
    assert found.decode == (Instance("http://decode:8000"),)
