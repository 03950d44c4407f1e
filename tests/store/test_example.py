"""The compose file of examples/store: valid, and made of settings that the proxy and the connector have."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvpipe.proxy import Environment, Instance
from kvpipe.store.urls import resolve_url

FILE = Path(__file__).parents[2] / "examples" / "store" / "compose.yaml"
SERVICES = yaml.safe_load(FILE.read_text())["services"]


def test_the_compose_file_is_one_by_its_schema():
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_proxy_knows_its_instances(tmp_path):
    found = Environment.read(SERVICES["proxy"]["environment"], tmp_path / ".env")
    assert found.prefill == (Instance("http://prefill:8000"),)
    assert found.decode == (Instance("http://decode:8000"),)


@pytest.mark.vllm
@pytest.mark.parametrize(("name", "role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_each_instance_shares_the_store(name, role):
    [config] = [text.partition("=")[2] for text in SERVICES[name]["command"] if "--kv-transfer-config" in text]
    assert json.loads(config) == {"kv_connector": "KVStoreConnector", "kv_role": role}
    url = SERVICES[name]["environment"]["KVPIPE_STORE"]
    assert resolve_url(url).url == "valkey://valkey:6379"
