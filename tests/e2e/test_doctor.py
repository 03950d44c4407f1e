"""`kvpipe doctor` beside real instances of vLLM, each of which produces and consumes."""

import json
import os
import subprocess
import sys

import pytest

from kvpipe.launch.plan import Instance
from tests.e2e.client import TOKEN, Servers


def doctor(*instances: Instance, token: str = TOKEN) -> tuple[int, dict]:
    """Its exit status and its object."""
    addresses = [f"{instance.url},{instance.control}" for instance in instances]
    command = [sys.executable, "-m", "kvpipe", "doctor", "--json", *addresses]
    environment = os.environ | {"KVPIPE_TOKEN": token}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.smoke
def test_nothing_is_wrong_with_real_instances_and_test_handoffs_are_full_each_way(servers: Servers) -> None:
    status, report = doctor(servers.prefill, servers.decode)
    assert (status, report["findings"]) == (0, [])
    handoffs = {pair["consumer"]: pair["handoff"] for pair in report["pairs"]}
    assert set(handoffs) == {servers.prefill.control, servers.decode.control}
    for handoff in handoffs.values():
        assert (handoff["result"], handoff["transport"], handoff["transport_reason"]) == ("full", "cma", "")
        assert handoff["blocks_received"] >= 2
    versions = {tuple(instance["description"]["versions"].items()) for instance in report["instances"]}
    assert len(versions) == 1


def test_a_wrong_token_is_named_by_real_instances(servers: Servers) -> None:
    status, report = doctor(servers.prefill, servers.decode, token="another token of 32 bytes")
    assert status == 1
    assert [finding["kind"] for finding in report["findings"]] == ["token", "token"]
