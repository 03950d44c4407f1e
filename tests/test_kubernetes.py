"""The overlays for Kubernetes: valid, read by the connector and the proxy, and made of parts that fit each other."""

import functools
import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvpipe import cli
from kvpipe.proxy import Instance, ProxyConfig
from kvpipe.vllm.handoff.allowed_producers import AllowedProducers
from kvpipe.vllm.handoff.config import ConnectorConfig


@functools.cache
def _renders() -> bool:
    """True if there is a kubectl that has Kustomize 5."""
    if shutil.which("kubectl") is None:
        return False
    done = subprocess.run(["kubectl", "version", "--client"], capture_output=True, text=True, check=False)
    return "Kustomize Version: v5" in done.stdout


FOLDER = Path(__file__).parents[1] / "examples" / "kubernetes"
FILES = sorted(FOLDER.rglob("*.yaml"))
OVERLAYS = sorted(folder.name for folder in (FOLDER / "overlays").iterdir())
# The base and the proxy as their files have them: no kubectl renders them.
UNRENDERED = "unrendered"
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
ROLES = tuple(KV_ROLES)
# The first release with sidecar containers that no gate has to enable, and the last one that is known.
KUBERNETES = ("1.29", "1.37")
POD_IP = "10.1.2.3"
# Seconds that vLLM has to end its processes after it has aborted what was left.
TEARDOWN_S = 15

each_overlay = pytest.mark.parametrize("overlay", [UNRENDERED, *OVERLAYS])
each_with_proxy = pytest.mark.parametrize("overlay", [UNRENDERED, "proxy", "proxy-2p2d"])
each_instance = pytest.mark.parametrize(("overlay", "role"), list(itertools.product([UNRENDERED, *OVERLAYS], ROLES)))


def unrendered() -> list[dict[str, Any]]:
    base = yaml.safe_load((FOLDER / "base" / "kustomization.yaml").read_text())
    files = [*(FOLDER / "base" / name for name in base["resources"]), FOLDER / "overlays" / "proxy" / "proxy.yaml"]
    maps = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": made["name"]},
            "data": dict(literal.split("=", 1) for literal in made["literals"]),
        }
        for made in base["configMapGenerator"]
    ]
    return [*maps, *(each for file in files for each in yaml.safe_load_all(file.read_text()))]


def kustomize(folder: Path) -> list[dict[str, Any]]:
    if not _renders():
        pytest.skip("no kubectl with Kustomize 5 was found: it renders the overlays")
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@functools.cache
def rendered(overlay: str) -> list[dict[str, Any]]:
    return unrendered() if overlay == UNRENDERED else kustomize(FOLDER / "overlays" / overlay)


def of_kind(overlay: str, kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in rendered(overlay) if each["kind"] == kind}


def templates_of(resources: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The templates of all pods."""
    return [each["spec"]["template"] for each in resources if "template" in each.get("spec", {})]


def templates(overlay: str) -> list[dict[str, Any]]:
    return templates_of(rendered(overlay))


def container(template: dict[str, Any]) -> dict[str, Any]:
    [only] = template["spec"]["containers"]
    return only


def instance(overlay: str, role: str) -> dict[str, Any]:
    return of_kind(overlay, "StatefulSet")[role]["spec"]["template"]


def environment(overlay: str, of: dict[str, Any]) -> dict[str, str]:
    """The variables of a container, as its process sees them."""
    values: dict[str, str] = {}
    for source in of.get("envFrom", ()):
        values |= of_kind(overlay, "ConfigMap")[source["configMapRef"]["name"]]["data"]
    for variable in of["env"]:
        is_pod_ip = variable.get("valueFrom") == {"fieldRef": {"fieldPath": "status.podIP"}}
        values[variable["name"]] = POD_IP if is_pod_ip else variable["value"]
    return values


def arguments(overlay: str, of: dict[str, Any]) -> list[str]:
    """The arguments of a container, with its variables in place of their names."""
    values = environment(overlay, of)
    words = of["args"]
    for name, value in values.items():
        words = [word.replace(f"$({name})", value) for word in words]
    assert not any("$(" in word for word in words)
    return words


def flags(overlay: str, of: dict[str, Any]) -> dict[str, str]:
    return dict(word.split("=", 1) for word in arguments(overlay, of) if "=" in word)


def ports(of: dict[str, Any]) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in of["ports"]}


def opened(policy: dict[str, Any]) -> list[tuple[dict[str, Any], set[tuple[Any, Any]]]]:
    """Each source of a policy, with the spans of ports that it may reach."""
    return [
        (source, {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]})
        for rule in policy["spec"]["ingress"]
        for source in rule["from"]
    ]


def is_selected(selector: dict[str, Any], template: dict[str, Any]) -> bool:
    return selector.get("matchLabels", {}).items() <= template["metadata"]["labels"].items()


def seconds_before_sigterm(of: dict[str, Any]) -> int:
    program, seconds = of["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    return int(seconds)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_each_file_has_resources_of_a_kind(file: Path) -> None:
    documents = list(yaml.safe_load_all(file.read_text()))
    assert documents
    assert all(document["apiVersion"] and document["kind"] for document in documents)


@each_overlay
@pytest.mark.parametrize("version", KUBERNETES)
def test_each_resource_is_one_by_its_schema(overlay: str, version: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate: make setup")
    for resource in rendered(overlay):
        kubernetes_validate.validate(resource, version, strict=True)


@each_instance
def test_the_connector_reads_the_settings_of_an_instance(
    overlay: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = container(instance(overlay, role))
    variables = environment(overlay, found)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    transfer = json.loads(flags(overlay, found)["--kv-transfer-config"])
    assert transfer == {"kv_connector": "KVPipeConnector", "kv_role": KV_ROLES[role]}
    config = ConnectorConfig.parse(transfer.get("kv_connector_extra_config", {}))
    assert config.addresses.advertised_control("0.0.0.0:7100", 0) == f"{POD_IP}:7100"
    assert config.addresses.agent == "0.0.0.0:7101-7108"
    settings = {f"KVPIPE_{name.upper()}" for name in vars(config)} | {"KVPIPE_TOKEN_FILE"}
    assert set(variables) - settings == {"MODEL", "HTTP_PORT"}


def test_decode_behind_llm_ds_sidecar_connects_to_pods_only() -> None:
    """A client's kv_transfer_params may reach it."""
    variables = environment("llm-d", container(instance("llm-d", "decode")))
    allowed = AllowedProducers(variables["KVPIPE_ALLOWED_PRODUCERS"])
    allowed.check(POD_IP)
    with pytest.raises(ValueError, match="is not among allowed_producers"):
        allowed.check("203.0.113.1")


@each_instance
def test_the_ports_of_an_instance_are_those_that_it_listens_on(overlay: str, role: str) -> None:
    found = container(instance(overlay, role))
    control = int(environment(overlay, found)["KVPIPE_LISTEN"].rpartition(":")[2])
    assert ports(found) == {"modelserver": int(flags(overlay, found)["--port"]), "kvpipe": control}


@each_overlay
def test_pods_have_no_variables_of_services(overlay: str) -> None:
    """A Service called vllm would set VLLM_PORT, which vLLM reads."""
    assert all(template["spec"]["enableServiceLinks"] is False for template in templates(overlay))


@each_overlay
def test_instances_open_the_ports_of_their_settings_to_each_other(overlay: str) -> None:
    variables = environment(overlay, container(instance(overlay, "prefill")))
    control = int(variables["KVPIPE_LISTEN"].rpartition(":")[2])
    first, last = (int(port) for port in variables["KVPIPE_AGENT_PORTS"].split("-"))
    assert first == control + 1
    policy = of_kind(overlay, "NetworkPolicy")["kvpipe-instances"]
    [(source, spans)] = opened(policy)
    assert spans == {(control, last)}
    for role in ROLES:
        assert is_selected(policy["spec"]["podSelector"], instance(overlay, role))
        assert is_selected(source["podSelector"], instance(overlay, role))


@each_with_proxy
def test_the_proxy_reaches_http_and_the_control_port(overlay: str) -> None:
    proxy = of_kind(overlay, "Deployment")["kvpipe-proxy"]["spec"]["template"]
    [(source, spans)] = opened(of_kind(overlay, "NetworkPolicy")["kvpipe-proxy"])
    assert is_selected(source["podSelector"], proxy)
    assert spans == {(port, port) for port in ports(container(instance(overlay, "decode"))).values()}


@each_with_proxy
def test_pods_of_the_namespace_reach_the_port_of_the_proxy(overlay: str) -> None:
    policy = of_kind(overlay, "NetworkPolicy")["kvpipe-clients"]
    assert is_selected(
        policy["spec"]["podSelector"], of_kind(overlay, "Deployment")["kvpipe-proxy"]["spec"]["template"]
    )
    assert opened(policy) == [({"podSelector": {}}, {("http", "http")})]


def test_the_sidecar_and_not_the_decode_instance_is_reached_by_llm_ds_router() -> None:
    """It takes the port of the pool, at which the router finds prefill instances too."""
    decode = instance("llm-d", "decode")
    [sidecar] = decode["spec"]["initContainers"]
    assert sidecar["restartPolicy"] == "Always"
    [(_, spans)] = opened(of_kind("llm-d", "NetworkPolicy")["kvpipe-llm-d"])
    pool = ports(container(instance("llm-d", "prefill")))["modelserver"]
    assert spans == {(pool, pool)}
    assert ports(sidecar) == {"sidecar": pool}
    assert f"--port={pool}" in sidecar["args"]
    # The sidecar's default for the model server's port.
    assert ports(container(decode))["modelserver"] == 8200
    for role in ROLES:
        labels = instance("llm-d", role)["metadata"]["labels"]
        assert (labels["llm-d.ai/guide"], labels["llm-d.ai/role"]) == ("pd-disaggregation", role)


@pytest.mark.parametrize(("overlay", "replicas"), [(UNRENDERED, 1), ("proxy", 1), ("proxy-2p2d", 2)])
def test_the_proxy_names_each_instance_by_its_stable_name_and_control_port(overlay: str, replicas: int) -> None:
    proxy = container(of_kind(overlay, "Deployment")["kvpipe-proxy"]["spec"]["template"])
    parsed = cli._parse(["proxy", *arguments(overlay, proxy)])
    for role in ROLES:
        stateful = of_kind(overlay, "StatefulSet")[role]["spec"]
        assert stateful["replicas"] == replicas
        service = of_kind(overlay, "Service")[stateful["serviceName"]]["spec"]
        assert service["clusterIP"] == "None"
        assert service["selector"] == stateful["selector"]["matchLabels"]
        assert is_selected(stateful["selector"], stateful["template"])
        found = ports(container(stateful["template"]))
        names = [f"{role}-{number}.{stateful['serviceName']}" for number in range(replicas)]
        assert [Instance.parse(text) for text in getattr(parsed, role)] == [
            Instance(f"http://{name}:{found['modelserver']}", f"{name}:{found['kvpipe']}") for name in names
        ]


@each_overlay
def test_the_token_is_mounted_where_its_file_is_read_and_belongs_to_the_group_of_the_process(overlay: str) -> None:
    for template in templates(overlay):
        spec, only = template["spec"], container(template)
        mounts = {mount["name"]: mount["mountPath"] for mount in only["volumeMounts"]}
        [secret] = [volume for volume in spec["volumes"] if "secret" in volume]
        assert environment(overlay, only)["KVPIPE_TOKEN_FILE"] == f"{mounts[secret['name']]}/token"
        assert secret["secret"] == {"secretName": "kvpipe-token", "defaultMode": 0o440}
        assert spec["securityContext"]["fsGroup"]
        assert spec["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize(("overlay", "role"), list(itertools.product(OVERLAYS, ROLES)))
def test_an_instance_that_ends_outlives_its_leases(overlay: str, role: str) -> None:
    """vLLM is told to keep what others fetch for longer than a lease, and has that time before SIGKILL."""
    template = instance(overlay, role)
    drain_s = int(flags(overlay, container(template))["--shutdown-timeout"])
    assert drain_s > ConnectorConfig().lease_s
    before_s = seconds_before_sigterm(container(template))
    assert template["spec"]["terminationGracePeriodSeconds"] >= before_s + drain_s + TEARDOWN_S


@each_with_proxy
def test_the_proxy_has_the_time_that_it_takes_to_drain(overlay: str) -> None:
    template = of_kind(overlay, "Deployment")["kvpipe-proxy"]["spec"]["template"]
    one = Instance("http://a:1", "a:2")
    drain_s = ProxyConfig(prefill=(one,), decode=(one,)).drain_timeout_s
    assert template["spec"]["terminationGracePeriodSeconds"] > seconds_before_sigterm(container(template)) + drain_s


@each_with_proxy
def test_an_instance_that_does_not_answer_leaves_the_proxy_ready(overlay: str) -> None:
    probe = container(of_kind(overlay, "Deployment")["kvpipe-proxy"]["spec"]["template"])["readinessProbe"]
    one = Instance("http://a:1", "a:2")
    assert (
        probe["periodSeconds"] > probe["timeoutSeconds"] > ProxyConfig(prefill=(one,), decode=(one,)).connect_timeout_s
    )


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_needs_no_operator(overlay: str) -> None:
    assert not of_kind(overlay, "PodMonitor")


@pytest.mark.parametrize("overlay", ["proxy", "llm-d"])
def test_the_components_that_an_overlay_names_in_comments_monitor_each_pod(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "overlays" / overlay / "kustomization.yaml"
    file.write_text(re.sub(r"^  # (- \.\./)", r"  \1", file.read_text(), flags=re.MULTILINE))
    resources = kustomize(file.parent)
    pods = templates_of(resources)
    policies = [
        (each["spec"]["podSelector"], opened(each))
        for each in resources
        if each["kind"] == "NetworkPolicy" and each["metadata"]["name"].endswith("-metrics")
    ]
    monitored = 0
    for monitor in (each for each in resources if each["kind"] == "PodMonitor"):
        assert monitor["metadata"]["labels"]["release"]
        selector = monitor["spec"]["selector"]
        selected = [pod for pod in pods if is_selected(selector, pod)]
        [endpoint] = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] == "/metrics"
        assert selected
        assert all(endpoint["port"] in ports(container(pod)) for pod in selected)
        [spans] = [
            {span for _, found in sources for span in found} for selects, sources in policies if selects == selector
        ]
        assert spans == {(endpoint["port"], endpoint["port"])}
        monitored += len(selected)
    assert monitored == len(pods)


@each_overlay
def test_each_probe_asks_a_port_of_its_container(overlay: str) -> None:
    for only in map(container, templates(overlay)):
        probes = [only[name]["httpGet"] for name in only if name.endswith("Probe")]
        assert {probe["port"] for probe in probes} <= set(ports(only))
        assert only["readinessProbe"]["httpGet"]["path"] == "/health"
