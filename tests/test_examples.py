"""The compose files of examples/: valid, and made of settings that the connector has."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvpipe.store.urls import resolve_url

FILES = sorted((Path(__file__).parents[1] / "examples").glob("*/compose*.yaml"))
SHARING = [file for file in FILES if "KVPIPE_STORE" in file.read_text()]


def services(file):
    return yaml.safe_load(file.read_text())["services"]


def name_of(file):
    return f"{file.parent.name}/{file.name}"


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_a_compose_file_is_one_by_its_schema(file):
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.vllm
@pytest.mark.parametrize("file", SHARING, ids=name_of)
def test_each_instance_shares_the_store(file):
    instances = {name: service for name, service in services(file).items() if name.startswith(("prefill", "decode"))}
    assert len(instances) >= 2
    for name, service in instances.items():
        [config] = [text.partition("=")[2] for text in service["command"] if "--kv-transfer-config" in text]
        role = "kv_producer" if name.startswith("prefill") else "kv_consumer"
        assert json.loads(config) == {"kv_connector": "KVStoreConnector", "kv_role": role}
        assert resolve_url(service["environment"]["KVPIPE_STORE"]).url == "valkey://valkey:6379"
