"""The example for Kubernetes: the connector and the proxy read its settings, and its parts fit each other."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpipe.vllm.handoff.config import ConnectorConfig

pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "kubernetes" / "prefill-decode.yaml"
POD_IP = "10.1.2.3"
DOCUMENTS = list(yaml.safe_load_all(EXAMPLE.read_text()))


def of_kind(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in DOCUMENTS if each["kind"] == kind}


def container(kind: str, name: str) -> dict[str, Any]:
    [only] = of_kind(kind)[name]["spec"]["template"]["spec"]["containers"]
    return only


def environment(of: dict[str, Any]) -> dict[str, str]:
    """The variables of a container, as its process sees them."""
    values = {}
    for source in of.get("envFrom", ()):
        values |= of_kind("ConfigMap")[source["configMapRef"]["name"]]["data"]
    for variable in of["env"]:
        is_pod_ip = variable.get("valueFrom") == {"fieldRef": {"fieldPath": "status.podIP"}}
        values[variable["name"]] = POD_IP if is_pod_ip else variable["value"]
    return values


def flags(of: dict[str, Any]) -> dict[str, str]:
    return dict(argument.split("=", 1) for argument in of["args"])


def span(ports: str) -> tuple[int, int]:
    first, last = ports.split("-")
    return int(first), int(last)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_connector_reads_the_settings_of_an_instance(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    instance = container("StatefulSet", role)
    variables = environment(instance)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    transfer = json.loads(flags(instance)["--kv-transfer-config"])
    assert transfer["kv_connector"] == "KVPipeConnector"
    config = ConnectorConfig.parse(transfer.get("kv_connector_extra_config", {}))
    assert config.addresses.advertised_control("0.0.0.0:7100", 0) == f"{POD_IP}:7100"
    assert config.addresses.agent == "0.0.0.0:7200-7207"
    settings = {f"KVPIPE_{name.upper()}" for name in vars(config)} | {"KVPIPE_TOKEN_FILE"}
    assert set(variables) - settings == set()


def test_the_policy_opens_the_ports_of_the_settings_to_the_instances_and_not_all_to_the_proxy() -> None:
    variables = environment(container("StatefulSet", "prefill"))
    control = int(variables["KVPIPE_LISTEN"].rpartition(":")[2])
    [policy] = of_kind("NetworkPolicy").values()
    between, proxy = (
        {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
        for rule in policy["spec"]["ingress"]
    )
    assert between == {(control, control), span(variables["KVPIPE_AGENT_PORTS"])}
    assert proxy == {(control, control), (8000, 8000)}
    selected = policy["spec"]["podSelector"]["matchLabels"].items()
    for name in ("prefill", "decode"):
        assert selected <= of_kind("StatefulSet")[name]["spec"]["template"]["metadata"]["labels"].items()


def test_the_proxy_names_the_instances_by_their_stable_names_and_control_ports() -> None:
    proxy = flags(container("Deployment", "proxy"))
    for role in ("prefill", "decode"):
        instance = container("StatefulSet", role)
        control = environment(instance)["KVPIPE_LISTEN"].rpartition(":")[2]
        name = f"{role}-0.{of_kind('StatefulSet')[role]['spec']['serviceName']}"
        assert proxy[f"--{role}"] == f"http://{name}:{flags(instance)['--port']},{name}:{control}"
        assert of_kind("Service")[role]["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize(
    ("kind", "name"), [("StatefulSet", "prefill"), ("StatefulSet", "decode"), ("Deployment", "proxy")]
)
def test_the_token_is_mounted_where_its_file_is_read(kind: str, name: str) -> None:
    spec = of_kind(kind)[name]["spec"]["template"]["spec"]
    [only] = spec["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in only["volumeMounts"]}
    secrets = {volume["name"] for volume in spec["volumes"] if "secret" in volume}
    [folder] = [path for volume, path in mounts.items() if volume in secrets]
    assert environment(only)["KVPIPE_TOKEN_FILE"] == f"{folder}/token"
    # YAML 1.1's octal: only the owner reads it.
    assert re.search(r"defaultMode: 0400\b", EXAMPLE.read_text())
