import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvpipe import cli
from kvpipe.exceptions import ConfigError, KVPipeError
from kvpipe.launch import gpus, ports, up
from kvpipe.launch.arguments import data_parallel_size
from kvpipe.launch.cores import sharing_text
from kvpipe.launch.deployment import Deployment, DeploymentSpec, DeploymentThread
from kvpipe.launch.plan import is_cpu_vllm
from kvpipe.launch.process import ChildProcess
from kvpipe.launch.spec import PROXY_COMMAND
from kvpipe.launch.tiny_model import RECIPE, RECIPE_FILE, make_tiny_model
from kvpipe.launch.up import _print_addresses
from kvpipe.launch.watchdog import Watchdog, group_members
from kvpipe.store.remote import RemoteStore
from tests.proxy.certificates import Authority

STAND_IN = (sys.executable, str(Path(__file__).with_name("stand_in_server.py")))

# Runs the command with the stand-in, which the command line has no option for
UP = """
import asyncio, sys
from kvpipe.launch.deployment import DeploymentSpec
from kvpipe.launch.up import run_up
num_decode, *command = sys.argv[1:]
commands = {"server_command": command, "proxy_command": command}
spec = DeploymentSpec(model="fine", num_decode=int(num_decode), grace_s=5.0, **commands)
sys.exit(asyncio.run(run_up(spec)))
"""


def stand_ins(**changes):
    commands = {"server_command": STAND_IN, "proxy_command": STAND_IN}
    return DeploymentSpec(**{"model": "fine", "grace_s": 5.0, **commands, **changes})


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def command_of(instance):
    return Path(f"/proc/{instance.child.pid}/cmdline").read_bytes().decode().split("\0")


def environment_of(instance):
    variables = Path(f"/proc/{instance.child.pid}/environ").read_bytes().decode().split("\0")
    return dict(variable.split("=", 1) for variable in variables if "=" in variable)


def kv_transfer_config(instance):
    command = command_of(instance)
    return json.loads(command[command.index("--kv-transfer-config") + 1])


@contextlib.contextmanager
def running_up(num_decode=1):
    """`kvpipe up` in a process of its own, healthy; yields it and the ids of its instances."""
    process = subprocess.Popen(
        [sys.executable, "-c", UP, str(num_decode), *STAND_IN],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        assert process.stdout.readline().startswith("curl -i ")
        yield process, children_of(process.pid)
    finally:
        process.kill()
        process.communicate()


def children_of(pid):
    """Its children but the watchdog, oldest first."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in children if "stand_in" in Path(f"/proc/{each}/cmdline").read_text()]


def test_all_are_healthy_inside_the_context_and_ended_after_it():
    with DeploymentThread(stand_ins(num_prefill=2, num_undivided=1)) as running:
        deployment = running.deployment
        names = [process.name for process in deployment.processes]
        pids = [process.child.pid for process in deployment.processes]
        assert names == ["prefill-0", "prefill-1", "decode-0", "undivided-0", "proxy"]
        assert all(len(group_members(pid)) == 2 for pid in pids)
        # One session, which is what Linux schedules as a group: see kvpipe.launch.process.
        assert {os.getsid(pid) for pid in pids} == {os.getsid(0)}
    assert [group_members(pid) for pid in pids] == [[]] * 5


def test_a_killed_instance_leaves_none_of_its_children():
    with DeploymentThread(stand_ins()) as running:
        instance = running.deployment.decode[0]
        pid = instance.child.pid
        instance.child.send_signal(signal.SIGKILL)
        assert running.call(running.deployment.until_a_role_has_ended()) is instance
        assert len(group_members(pid)) == 1
    assert group_members(pid) == []
    assert instance.child.returncode == -signal.SIGKILL


def test_an_instance_that_ignores_sigterm_is_killed_after_the_grace():
    with DeploymentThread(stand_ins(model="stubborn", grace_s=0.3)) as running:
        pids = [process.child.pid for process in running.deployment.instances]
    assert [group_members(pid) for pid in pids] == [[], []]


@pytest.mark.parametrize(
    ("vllm_args", "grace_s", "waits_s"),
    [((), 0.3, 0.3), (("--shutdown-timeout", "0"), 0.3, 0.3), (("--shutdown-timeout=45",), 15, 50)],
)
def test_the_grace_of_an_instance_is_longer_than_its_shutdown_timeout(vllm_args, grace_s, waits_s):
    assert stand_ins(vllm_args=vllm_args, grace_s=grace_s).instance_grace_s == waits_s


def test_an_instance_is_not_killed_while_vllm_lets_it_finish_its_requests():
    with DeploymentThread(stand_ins(model="slow", grace_s=0.1, vllm_args=("--shutdown-timeout=30",))) as running:
        instances = running.deployment.instances
    assert [each.child.returncode for each in instances] == [0, 0]


def test_restart_keeps_the_addresses():
    with DeploymentThread(stand_ins()) as running:
        instance = running.deployment.prefill[0]
        before = instance.url, instance.control, instance.child.pid
        running.call(running.deployment.restart(instance))
        assert (instance.url, instance.control) == before[:2]
        assert instance.child.is_running
        assert instance.child.pid != before[2]
        assert group_members(before[2]) == []


def test_the_next_start_of_a_child_has_the_command_and_the_variables_that_it_was_given_meanwhile():
    async def run():
        watchdog = Watchdog()
        child = ChildProcess("child", ("/bin/sh", "-c", "echo before"), {}, watchdog=watchdog)
        for _ in range(2):
            await child.start()
            await child.wait()
            await child.stop(0)
            child.command, child.env["WORD"] = (*child.command[:2], "echo $WORD"), "after"
        await watchdog.close()
        return child.tail

    assert asyncio.run(run()) == ("before", "after")


def test_an_instance_that_dies_while_starting_is_named_with_its_last_lines():
    with (
        pytest.raises(KVPipeError, match=r"(?s)(prefill|decode)-0 ended with exit code 3 .*out of memory"),
        DeploymentThread(stand_ins(model="dies")),
    ):
        pass


def test_a_start_that_takes_too_long_ends_with_the_names_of_who_was_not_ready():
    silent = (sys.executable, "-c", "import time; time.sleep(600)")
    with (
        pytest.raises(KVPipeError, match="prefill-0, decode-0: not healthy after 0 s"),
        DeploymentThread(stand_ins(server_command=silent, startup_timeout_s=0.1)),
    ):
        pass


@pytest.mark.parametrize(
    ("host", "family", "shown"), [("127.0.0.1", socket.AF_INET, "127.0.0.1"), ("::1", socket.AF_INET6, r"\[::1\]")]
)
def test_a_port_in_use_is_found_before_anything_starts(host, family, shown):
    with socket.create_server((host, 0), family=family) as taken:
        port = taken.getsockname()[1]
        thread = DeploymentThread(stand_ins(host=host, port=port))
        with pytest.raises(ConfigError, match=f"cannot listen on {shown}:{port}: Address already in use"), thread:
            pass
    assert [process.child.pid for process in thread.deployment.processes] == [None] * 3


def test_no_port_is_one_that_the_system_may_hand_to_others_meanwhile():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with DeploymentThread(stand_ins()) as running:
        deployment = running.deployment
        instances = [*deployment.prefill, *deployment.decode]
        addresses = [each.url for each in (*instances, deployment.proxy)] + [each.control for each in instances]
    numbers = {int(address.rpartition(":")[2]) for address in addresses}
    assert len(numbers) == len(addresses)
    assert all(number < first for number in numbers)


def test_the_control_ports_of_data_parallel_ranks_follow_that_of_the_first_one(monkeypatch):
    [*firsts] = ports.free_ports(4, 4)
    ports.release_ports(port + rank for port in firsts for rank in range(4))
    with socket.create_server(("127.0.0.1", firsts[0] + 2)), monkeypatch.context() as patch:
        patch.setattr(ports.random, "sample", lambda *_: firsts)
        assert ports.free_ports(3, 4) == firsts[1:]
    ports.release_ports(port + rank for port in firsts[1:] for rank in range(4))
    with DeploymentThread(stand_ins(proxy_command=None, vllm_args=("--data-parallel-size=4",))) as running:
        first = [int(each.control.rpartition(":")[2]) for each in running.deployment.instances]
        others = [int(each.url.rpartition(":")[2]) for each in running.deployment.instances]
    assert len({port + rank for port in (*first, *others) for rank in range(4)}) == 16


def test_a_port_is_picked_once_until_the_deployment_that_listens_there_has_ended(monkeypatch):
    with DeploymentThread(stand_ins()) as running:
        # A stand-in does not listen there.
        port = int(running.deployment.prefill[0].control.rpartition(":")[2])
        monkeypatch.setattr(ports.random, "sample", lambda *_: [port])
        with pytest.raises(ConfigError, match="found 0 of 1 free ports"):
            ports.free_ports(1)
        with socket.create_server(("127.0.0.1", port)):
            pass
    assert ports.free_ports(1) == [port]
    ports.release_ports([port])


@pytest.mark.parametrize("args", [("--data_parallel_size", "4"), ("--data_parallel_size=4",), ("-dp", "4")])
def test_the_number_of_data_parallel_ranks_is_found_as_vllm_reads_it(args):
    assert data_parallel_size(args) == 4


def test_each_role_gets_its_connector_configuration():
    with DeploymentThread(stand_ins(connector_config={"lease_s": 5}, num_undivided=1)) as running:
        deployment = running.deployment
        producer, consumer = deployment.prefill[0], deployment.decode[0]
        assert kv_transfer_config(producer) == {
            "kv_connector": "KVPipeConnector",
            "kv_connector_module_path": "kvpipe.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"listen": producer.control, "lease_s": 5},
        }
        assert kv_transfer_config(consumer)["kv_role"] == "kv_consumer"
        assert "--kv-transfer-config" not in command_of(deployment.undivided[0])
        assert f"{producer.url},{producer.control}" in command_of(deployment.proxy)


def test_instances_that_share_a_store_have_its_connector_and_no_control_port():
    spec = stand_ins(store="redis://127.0.0.1:6379", connector_config={"chunk_size": 32})
    with DeploymentThread(spec) as running:
        deployment = running.deployment
        producer, consumer = deployment.prefill[0], deployment.decode[0]
        assert kv_transfer_config(producer) == {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvpipe.store_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"store": "redis://127.0.0.1:6379", "chunk_size": 32},
        }
        assert kv_transfer_config(consumer)["kv_role"] == "kv_consumer"
        assert "--scheduler-cls" not in command_of(consumer)
        command = command_of(deployment.proxy)
        assert command[command.index("--dispatch") + 1] == "store"
        assert {producer.url, consumer.url} < set(command)
        assert deployment.store is None


def test_a_store_of_its_own_is_started_first_and_ended_last():
    states = []
    with DeploymentThread(stand_ins(store="own"), report=states.append) as running:
        deployment = running.deployment
        command = command_of(deployment.store)
        address = command[command.index("--listen") + 1]
        for instance in (*deployment.prefill, *deployment.decode):
            assert kv_transfer_config(instance)["kv_connector_extra_config"]["store"] == f"kvpipe://{address}"
        with RemoteStore.open(f"kvpipe://{address}", token=environment_of(deployment.store)["KVPIPE_TOKEN"]) as store:
            assert store.put(b"key", b"value")
    names = [line.split()[0] for line in states]
    assert names[0] == names[-1] == "store"


@pytest.mark.parametrize(
    ("split_from", "passed_on"), [(None, []), (0, ["--split-from", "0"]), (9, ["--split-from", "9"])]
)
def test_the_proxy_gets_split_from_where_it_was_given(split_from, passed_on):
    proxy = Deployment(stand_ins(split_from=split_from)).proxy
    command = proxy.child.command
    assert [part for part in command if part in ("--split-from", "0", "9")] == passed_on


def test_a_proxy_with_a_certificate_and_keys_is_healthy_and_a_wrong_file_is_found_before_anything_starts(
    tmp_path, capsys
):
    certificate, key_file = Authority(tmp_path).issue(), tmp_path / "keys"
    key_file.write_text("any")
    files = {**certificate.of_endpoint, "api_key_file": key_file}
    with DeploymentThread(stand_ins(proxy_command=PROXY_COMMAND, **files)) as running:
        url = running.deployment.url
        assert url.startswith("https://127.0.0.1:")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{url}/v1/models", context=certificate.client_context(), timeout=10)
        _print_addresses(running.deployment)
        assert "-H 'authorization: Bearer KEY'" in capsys.readouterr().out
    key_file.unlink()
    with pytest.raises(ConfigError, match=r"api_key_file=.* cannot be read"), DeploymentThread(stand_ins(**files)):
        pass


def test_all_share_one_token_that_no_command_line_shows(tmp_path):
    with DeploymentThread(stand_ins(token="secret", log_dir=tmp_path)) as running:
        for process in running.deployment.processes:
            log = tmp_path / f"{process.name}.log"
            wait_until(lambda log=log: "stand-in token: secret" in log.read_text())
            assert not any("secret" in argument for argument in command_of(process))


@pytest.mark.parametrize("is_of_spec", [False, True])
def test_all_processes_read_the_token_file_themselves(monkeypatch, tmp_path, is_of_spec):
    file = tmp_path / "token"
    file.write_bytes(b"of a file \0 \xff\n")
    monkeypatch.delenv("KVPIPE_TOKEN", raising=False)
    if not is_of_spec:
        monkeypatch.setenv("KVPIPE_TOKEN_FILE", str(file))
    env = {"KVPIPE_TOKEN_FILE": str(file)} if is_of_spec else {}
    with DeploymentThread(stand_ins(env=env)) as running:
        for process in running.deployment.processes:
            variables = environment_of(process)
            assert ("KVPIPE_TOKEN" in variables, variables["KVPIPE_TOKEN_FILE"]) == (False, str(file))


def test_a_token_file_that_is_missing_is_named_before_anything_starts(monkeypatch):
    monkeypatch.delenv("KVPIPE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="KVPIPE_TOKEN_FILE='/no such file' cannot be read"):
        Deployment(stand_ins(env={"KVPIPE_TOKEN_FILE": "/no such file"}))


def test_without_a_token_each_run_has_its_own(monkeypatch):
    for name in ("KVPIPE_TOKEN", "KVPIPE_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    tokens = set()
    for _ in range(2):
        lines = []
        with DeploymentThread(stand_ins(proxy_command=None), echo=lines.append) as running:
            wait_until(lambda lines=lines: sum("token: " in line for line in lines) == 2)
            assert running.deployment.proxy is None
        tokens |= {line.rpartition(" ")[2] for line in lines if "token: " in line}
    assert len(tokens) == 2
    assert min(map(len, tokens)) >= 32


def test_log_lines_are_prefixed_with_the_name_of_the_process():
    lines = []
    with DeploymentThread(stand_ins(), echo=lines.append):
        pass
    prefixes = {line.partition(" ")[0] for line in lines}
    assert prefixes == {"[prefill-0]", "[decode-0]", "[proxy]"}


@pytest.mark.skipif(not is_cpu_vllm(), reason="vLLM's CPU build is not installed")
def test_the_users_environment_wins_over_the_defaults_for_cpu(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    with DeploymentThread(stand_ins(proxy_command=None)) as running:
        environment = environment_of(running.deployment.prefill[0])
    assert environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_decode_instances_continue_after_prefills_token():
    with DeploymentThread(stand_ins(proxy_command=None, num_undivided=1)) as running:
        scheduler = {
            each.role: "kvpipe.connector.ContinuingScheduler" in command_of(each)
            for each in running.deployment.instances
        }
    assert scheduler == {"prefill": False, "decode": True, "undivided": False}


@pytest.fixture
def cores(monkeypatch):
    """Sets the cores that this process may use, as it sees them; only vLLM would pin threads to them."""
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    return lambda *numbers: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(numbers))


def pinned(**changes):
    """The cores of each instance as vLLM is told them, and the lines about them."""
    lines = []
    with DeploymentThread(stand_ins(proxy_command=None, **changes), report=lines.append) as running:
        instances = running.deployment.instances
        bound = [environment_of(instance)["VLLM_CPU_OMP_THREADS_BIND"] for instance in instances]
        assert [",".join(map(str, instance.cores)) for instance in instances] == bound
    assert all(
        f"cores {cores}" in next(line for line in lines if line.startswith(instance.name))
        for instance, cores in zip(instances, bound, strict=True)
    )
    return bound


def test_with_one_omp_thread_on_two_cores_prefill_and_decode_have_a_core_each(cores):
    cores(0, 1)
    assert pinned(omp_threads=1) == ["0", "1"]


def test_two_by_two_on_two_cores_share_them_in_turn(cores):
    cores(0, 1)
    assert pinned(omp_threads=1, num_prefill=2, num_decode=2) == ["0", "1", "0", "1"]


def test_only_cores_that_the_process_may_use_are_dealt_out(cores):
    cores(9, 3, 4, 5)
    assert pinned(omp_threads=2, num_undivided=1) == ["3,4", "5,9", "3,4"]


def test_more_omp_threads_than_cores_are_refused_with_both_numbers(cores):
    cores(0, 1)
    with pytest.raises(ConfigError, match="omp_threads=3: this process may use 2 cores; use at most 2"):
        DeploymentThread(stand_ins(omp_threads=3))


def test_omp_threads_and_a_binding_of_the_users_contradict_each_other(cores, monkeypatch):
    cores(0, 1)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-7")
    with pytest.raises(ConfigError, match=r"omp_threads=1 and VLLM_CPU_OMP_THREADS_BIND='0-7' .*unset one"):
        DeploymentThread(stand_ins(omp_threads=1))


def test_workers_that_share_cores_are_told_with_their_numbers():
    assert sharing_text([(0,), (1,)]) == ""
    assert sharing_text([(), ()]) == ""
    assert sharing_text([(0,), (1,), (0,), (1,)]) == "4 instances share 2 cores: 4 OMP threads in all"
    assert sharing_text([(0,), (0,)]) == "2 instances share 1 core: 2 OMP threads in all"


def test_each_state_of_each_process_is_one_line_with_its_addresses():
    lines = []
    with DeploymentThread(stand_ins(), report=lines.append) as running:
        deployment = running.deployment
        prefill = deployment.prefill[0]
        assert [line.split()[:2] for line in lines[:2]] == [["prefill-0", "starting"], ["decode-0", "starting"]]
        assert [line.split()[:2] for line in lines[-2:]] == [["proxy", "starting"], ["proxy", "healthy"]]
        for process in deployment.processes:
            assert [process.url in line for line in lines if line.startswith(process.name)] == [True, True]
        healthy = next(line for line in lines if line.startswith("prefill-0  healthy after "))
        assert healthy.endswith(f"control {prefill.control}")
        lines.clear()
        running.call(deployment.restart(prefill))
        assert [line.split()[:2] for line in lines] == [
            ["prefill-0", word] for word in ("ended", "starting", "healthy")
        ]
        lines.clear()
    ended = sorted(re.split(r"  +", line)[:2] for line in lines)
    assert ended == [[name, "ended with exit code 0"] for name in ("decode-0", "prefill-0", "proxy")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_ends_everything_on_a_signal_and_returns_success(number):
    with running_up() as (process, pids):
        assert len(pids) == 3
        process.send_signal(number)
        assert process.wait(20) == 0
        assert [group_members(pid) for pid in pids] == [[]] * 3


def test_up_reports_who_died_and_how_and_ends_the_others():
    with running_up() as (process, pids):
        os.kill(pids[1], signal.SIGKILL)
        _, log = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "kvpipe up: decode-0 ended with signal SIGKILL: ending the others" in log
        ended = [line for line in log.splitlines() if line.startswith("kvpipe up: decode-0 ") and " http://" in line]
        assert [line.split()[3] for line in ended] == ["starting", "healthy", "ended"]
        assert [group_members(pid) for pid in pids] == [[]] * 3


def test_up_goes_on_until_the_last_instance_of_a_role_has_ended():
    with running_up(num_decode=2) as (process, pids):
        os.kill(pids[1], signal.SIGKILL)
        lines = iter(process.stderr.readline, "")
        assert any(line.startswith("kvpipe up: decode-0   ended with signal SIGKILL") for line in lines)
        assert all(len(group_members(pid)) == 2 for pid in (pids[0], *pids[2:]))
        os.kill(pids[2], signal.SIGKILL)
        _, log = process.communicate(timeout=20)
        assert process.returncode == 1
        assert "kvpipe up: decode-1 ended with signal SIGKILL: ending the others" in log
        assert [group_members(pid) for pid in pids] == [[]] * 4


def test_a_killed_up_ends_its_instances():
    with running_up() as (process, pids):
        assert len(pids) == 3
        process.kill()
        wait_until(lambda: not any(group_members(pid) for pid in pids))


def test_a_killed_up_ends_even_the_children_of_a_killed_instance():
    with running_up() as (process, pids):
        process.send_signal(signal.SIGSTOP)  # so that it cannot see the death of the instance
        os.kill(pids[0], signal.SIGKILL)
        process.kill()
        wait_until(lambda: not any(group_members(pid) for pid in pids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_prefill": 0}, "num_prefill must be at least 1, not 0"),
        ({"num_undivided": -1}, "num_undivided must be at least 0, not -1"),
        ({"split_from": -1}, "split_from must be at least 0, not -1"),
        ({"block_size": 0}, "block_size must be at least 1, not 0"),
        ({"vllm_args": ("--shutdown-timeout=soon",)}, "--shutdown-timeout soon: expected a number, 0 or more"),
        ({"omp_threads": 0}, "omp_threads must be at least 1, not 0"),
    ],
)
def test_a_spec_that_cannot_be_started_names_field_and_value(change, message):
    with pytest.raises(ConfigError, match=message):
        stand_ins(**change)


@pytest.mark.parametrize(
    ("vllm_args", "name"),
    [
        ((), "fine"),
        (("--served-model-name", "tiny"), "tiny"),
        (("--served-model-name=tiny",), "tiny"),
        (("--served-model-name", "tiny", "--served-model-name", "mine"), "mine"),
    ],
)
def test_served_model_is_the_name_that_clients_use(vllm_args, name):
    assert stand_ins(vllm_args=vllm_args).served_model == name


# --- Without a model's name


@pytest.fixture
def cached_model(monkeypatch, tmp_path):
    """The folder of the tiny model, with a mark of one that was made."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(up, "_check_vllm", lambda: None)
    folder = tmp_path / "kvpipe" / "tiny-model"
    folder.mkdir(parents=True)
    (folder / RECIPE_FILE).write_text(RECIPE + "\n")
    return folder


@pytest.fixture
def started_with(monkeypatch):
    """Runs the command line; returns the specification of the deployment that it would start."""
    specs = []

    async def note(spec):
        specs.append(spec)
        return 0

    monkeypatch.setattr(up, "run_up", note)
    return lambda *args: (cli.main(["up", *args]), specs.pop())[1]


def test_without_a_model_a_tiny_one_is_served_and_one_line_says_so(cached_model, started_with, capsys):
    spec = started_with("--decode", "2", "--", "--max-model-len", "64")
    assert (spec.model, spec.num_decode, spec.served_model) == (str(cached_model), 2, "tiny")
    assert spec.vllm_args[-2:] == ("--max-model-len", "64")
    assert capsys.readouterr().err == (
        f"kvpipe up: no model named: serving a tiny one with random weights, {cached_model}; "
        "for another: kvpipe up MODEL\n"
    )
    assert started_with("--", "--served-model-name", "mine").served_model == "mine"


def test_a_model_that_is_named_gets_no_argument_of_the_tiny_one(cached_model, started_with, capsys):
    spec = started_with("MODEL", "--", "--enforce-eager")
    assert (spec.model, list(spec.vllm_args)) == ("MODEL", ["--enforce-eager"])
    assert capsys.readouterr().err == ""


def test_the_tiny_model_is_made_once_and_never_over_something_else(cached_model):
    assert make_tiny_model(cached_model) == cached_model
    assert [each.name for each in cached_model.iterdir()] == [RECIPE_FILE]
    other = cached_model / "other"
    other.touch()
    with pytest.raises(ConfigError, match=f"{other} exists and is no tiny model: name a model, or remove it"):
        make_tiny_model(other)
    with pytest.raises(ConfigError, match=f"cannot make a model in {other}/model: File exists; name a model"):
        make_tiny_model(other / "model")


# --- GPUs


def placed(**changes):
    """The GPUs of each instance as its environment names them, and its share of their memory."""
    with DeploymentThread(stand_ins(proxy_command=None, **changes)) as running:
        instances = running.deployment.instances
        found = [environment_of(instance).get("CUDA_VISIBLE_DEVICES") for instance in instances]
        commands = [command_of(instance) for instance in instances]
    flag = "--gpu-memory-utilization"
    return found, [command[command.index(flag) + 1] if flag in command else None for command in commands]


def test_instances_get_the_gpus_in_turn(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert placed() == ([None, None], [None, None])
    assert placed(gpus=("2", "5")) == (["2", "5"], [None, None])
    args = ("--tensor-parallel-size", "2")
    assert placed(gpus=("0", "1", "2", "3"), vllm_args=args) == (["0,1", "2,3"], [None, None])
    args = ("-tp", "2", "-dp=2")
    assert placed(gpus=tuple("01234567"), vllm_args=args) == (["0,1,2,3", "4,5,6,7"], [None, None])


def test_instances_that_share_a_gpu_have_equal_parts_of_its_memory_unless_the_user_has_chosen():
    assert placed(gpus=("0",), num_decode=2) == (["0", "0", "0"], ["0.3", "0.3", "0.3"])
    assert placed(gpus=("0", "1"), num_decode=2) == (["0", "1", "0"], ["0.45", None, "0.45"])
    chosen = ("--gpu-memory-utilization=0.2",)
    with DeploymentThread(stand_ins(proxy_command=None, gpus=("0",), vllm_args=chosen)) as running:
        assert all(command_of(each).count("--gpu-memory-utilization") == 0 for each in running.deployment.instances)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": ("0", "0")}, "gpus=0,0: 0 is named twice"),
        ({"gpus": ("0",), "vllm_args": ("-tp=2",)}, "--tensor-parallel-size 2 needs 2 GPUs"),
        ({"gpus": ("0",), "vllm_args": ("-tp", "two")}, "--tensor-parallel-size two: expected a number"),
        (
            {"gpus": ("0", "1"), "vllm_args": ("-tp=2", "-dp=2")},
            "--tensor-parallel-size 2 and --data-parallel-size 2 needs 4 GPUs",
        ),
        ({"vllm_args": ("-dp", "0")}, "--data-parallel-size 0: expected a number, 1 or more"),
    ],
)
def test_gpus_that_do_not_fit_are_refused_with_both_numbers(change, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        DeploymentThread(stand_ins(**change))


def test_a_gpu_that_is_shared_or_short_of_memory_is_named():
    shares, memory = gpus.assign_gpus(2, ("0",), ()), {"0": gpus.GpuMemory(total=80 << 10, free=60 << 10)}
    shared, short = gpus.sharing_text(shares, (), memory)
    assert shared == "2 instances share GPU 0: 0.45 of its memory each, started one after the other"
    assert short.startswith("GPU 0 is short of memory: 72.0 GiB are wanted, 60.0 of 80.0 are free")
    assert gpus.sharing_text(gpus.assign_gpus(2, ("0", "1"), ()), (), {}) == []
    chosen = ("--gpu-memory-utilization", "0.3")
    assert len(gpus.sharing_text(gpus.assign_gpus(2, ("0",), chosen), chosen, memory)) == 1


@pytest.mark.parametrize(
    ("num_instances", "listed", "args", "turns"),
    [
        (3, ("0",), (), [0, 1, 2]),
        (4, ("0", "1"), (), [0, 0, 1, 1]),
        (3, ("0", "1", "2"), ("-tp", "2"), [0, 1, 2]),
        (2, ("0", "1"), (), [0, 0]),
        (2, (), (), [0, 0]),
        (3, ("0",), ("--kv-cache-memory-bytes=1024",), [0, 0, 0]),
    ],
)
def test_instances_that_share_a_gpu_have_turns_unless_vllm_need_not_measure_its_memory(
    num_instances, listed, args, turns
):
    assert gpus.start_turns(gpus.assign_gpus(num_instances, listed, args), args) == turns


def test_an_instance_starts_when_the_one_before_it_on_its_gpu_is_healthy():
    told = []
    with DeploymentThread(stand_ins(proxy_command=None, gpus=("0",)), report=told.append):
        states = [tuple(line.split()[:2]) for line in told]
    assert states == [(name, state) for name in ("prefill-0", "decode-0") for state in ("starting", "healthy")]


def test_the_memory_of_gpus_is_what_nvidia_smi_reports(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, GPU-ab, 81559, 81000'\necho '1, GPU-cd, [N/A], [N/A]'\necho 'No devices'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    memory = gpus.query_memory()
    assert memory["0"] == memory["GPU-ab"] == gpus.GpuMemory(81559, 81000)
    assert "1" not in memory
    program.write_text("#!/bin/sh\nexit 9\n")
    assert gpus.query_memory() == {}
