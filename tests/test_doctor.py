"""`kvpipe doctor`: what is wrong is made so, and named. Control ports, agents and their sessions are real."""

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
from contextlib import AsyncExitStack, contextmanager
from functools import partial

import pytest

from kvpipe import _machine
from kvpipe._machine import machine
from kvpipe.cli import main
from kvpipe.doctor import handoffs
from kvpipe.doctor.examine import examine
from kvpipe.doctor.facts import Facts, Failure, HttpFacts, InstanceAddress, InstanceFacts
from kvpipe.doctor.findings import find
from kvpipe.doctor.report import document, text
from tests.doctor_instance import DoctorInstance
from tests.peers import ROOT, Child

LIMIT_S = 60.0
TOKEN, OTHER_TOKEN = "0123456789abcdef", "fedcba9876543210"


@pytest.fixture
def new_instance():
    instances = []

    def make(role, **facts):
        instances.append(DoctorInstance(role, **facts))
        return instances[-1]

    yield make
    for instance in instances:
        instance.close()


@pytest.fixture
def doctor(capsys):
    """Runs the command on control ports, and returns its exit status and its object."""

    def run(*addresses, timeout=5.0):
        status = main(["doctor", *addresses, "--json", "--timeout", str(timeout)])
        return status, json.loads(capsys.readouterr().out)

    return run


def findings(report, kind):
    return [finding for finding in report["findings"] if finding["kind"] == kind]


def only(report, kind):
    """The only finding, of this kind."""
    (finding,) = report["findings"]
    assert finding["kind"] == kind, finding
    return finding


async def examined(*instances, announce=lambda _: None, ssl_context=None, **files):
    """Facts and findings of instances with an API."""
    async with asyncio.timeout(LIMIT_S), AsyncExitStack() as stack:
        served = [await stack.enter_async_context(instance.serve(ssl_context)) for instance in instances]
        targets = list(map(InstanceAddress.parse, served))
        facts = await examine(targets, token=None, timeout_s=5.0, announce=announce, **files)
        return facts, find(facts)


async def examined_beside(instance, address):
    """Facts of an instance, and of one in another process."""
    async with asyncio.timeout(LIMIT_S), instance.serve() as served:
        targets = [InstanceAddress.parse(each) for each in (served, address)]
        return await examine(targets, token=None, timeout_s=5.0, announce=lambda _: None)


def test_nothing_is_wrong_with_a_pair_that_agrees(new_instance, doctor):
    producer, consumer = new_instance("kv_producer"), new_instance("kv_consumer")
    status, report = doctor(producer.address, consumer.address)
    assert (status, report["ok"], report["findings"]) == (0, True, [])
    assert [worker["transport"] for each in report["instances"] for worker in each["workers"]] == ["cma", "cma"]
    pair = {"producer": producer.address, "consumer": consumer.address}
    assert report["pairs"] == [pair | {"refusal": "", "handoff": None, "failure": "", "skipped": ""}]


def test_a_wrong_token_is_named(new_instance, doctor, monkeypatch):
    monkeypatch.setenv("KVPIPE_TOKEN", TOKEN)
    producer = new_instance("kv_producer", token=TOKEN.encode())
    consumer = new_instance("kv_consumer", token=OTHER_TOKEN.encode())
    status, report = doctor(producer.address, consumer.address)
    finding = only(report, "token")
    assert status == 1
    assert finding["instances"] == [consumer.address]
    assert "KVPIPE_TOKEN" in finding["remedy"]


def test_another_model_is_named_field_by_field_with_the_flag_that_fixes_it(new_instance, doctor):
    producer = new_instance("kv_producer")
    consumer = new_instance("kv_consumer", fingerprint={"model": "other", "block size": "32"})
    status, report = doctor(producer.address, consumer.address)
    model, block_size = findings(report, "fingerprint")
    assert status == 1
    assert model["problem"] == f"model differs: 'tiny' at {producer.address}; 'other' at {consumer.address}"
    assert block_size["problem"].startswith("block size differs: '16' at ")
    assert "--block-size" in block_size["remedy"]
    assert 'model is "other" here and "tiny" there' in report["pairs"][0]["refusal"]
    assert findings(report, "pair") == [], "the refusal is that of the fingerprint"


def test_a_closed_port_is_named(new_instance, doctor):
    producer, consumer = new_instance("kv_producer"), new_instance("kv_consumer")
    consumer.control.close()
    status, report = doctor(producer.address, consumer.address)
    finding = only(report, "port")
    assert status == 1
    assert finding["instances"] == [consumer.address]
    assert consumer.address in finding["problem"]
    assert "firewall" in finding["remedy"]


def test_a_name_without_an_address_is_named(doctor):
    status, report = doctor("nowhere.invalid:7100")
    finding = only(report, "name")
    assert status == 1
    assert finding["problem"].startswith("the name of nowhere.invalid:7100 has no address: ")
    assert "/etc/hosts" in finding["remedy"]


@pytest.mark.parametrize(
    ("error", "kind", "part"),
    [
        (socket.gaierror(-2, "not known"), "name", "has no address: not known"),
        (ConnectionRefusedError(111, "x"), "port", "refuses connections"),
        (OSError(113, "x"), "unreached", "No route to host"),
        (TimeoutError(), "unreached", "none in time"),
        (OSError("Multiple exceptions"), "unreached", "Multiple exceptions"),
    ],
)
def test_each_way_to_have_no_connection_has_its_sentence(error, kind, part):
    failure = Failure.without_connection("a:1", error)
    assert failure.kind == kind
    assert part in failure.text


def test_the_short_token_of_this_process_is_wrong_usage_and_is_not_shown(doctor, monkeypatch, capsys):
    monkeypatch.setenv("KVPIPE_TOKEN", "too-short")
    assert main(["doctor", "198.51.100.1:7100"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "connecting to 198.51.100.1:7100 needs a token of 16 bytes or more" in shown.err
    assert "too-short" not in shown.err
    assert shown.err.count("\n") == 1


def test_a_closed_port_of_a_worker_is_named_with_its_rank(new_instance, doctor):
    producer = new_instance("kv_producer")
    producer.agent.close()
    status, report = doctor(producer.address)
    assert status == 1
    assert only(report, "port")["problem"].startswith(f"rank 0 of {producer.address}: ")


def test_a_stopped_process_is_named_in_bounded_time(new_instance, doctor):
    producer, stopped = new_instance("kv_producer"), Child("kv_consumer", "stop", module="tests.doctor_instance")
    address = stopped.read().partition(",")[2]
    os.waitid(os.P_PID, stopped.process.pid, os.WSTOPPED)
    status, report = doctor(producer.address, address, timeout=0.5)
    finding = only(report, "silent")
    assert status == 1
    assert finding["problem"] == f"{address} accepts connections, and did not answer within 0.5 s"
    assert "stopped" in finding["remedy"]
    stopped.process.kill()
    stopped.process.wait()


def test_a_port_that_says_nothing_is_named_beside_instances_that_answer(new_instance, doctor):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        status, report = doctor(address, new_instance("kv_producer").address, timeout=0.5)
    assert (status, only(report, "silent")["instances"]) == (1, [address])
    assert report["instances"][1]["description"]["role"] == "kv_producer"


def test_a_refused_process_vm_readv_is_named_with_the_reason_of_this_process(new_instance):
    address = new_instance("kv_producer").address
    program = (
        "import sys; from tests.doctor_instance import refuse_process_vm_readv; from kvpipe.cli import main;"
        f"refuse_process_vm_readv(); sys.exit(main(['doctor', '{address}', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=LIMIT_S, check=True)
    report = json.loads(done.stdout)
    finding = only(report, "data path from here")
    assert finding["level"] == "note", "instances may run otherwise"
    assert "process_vm_readv" in finding["problem"]
    assert "the seccomp profile of this process does not allow it: allow process_vm_readv in it" in finding["problem"]
    assert report["instances"][0]["workers"][0]["transport"] == "tcp"


@contextmanager
def with_rdma_devices(*command):
    """Runs a command where the kernel seems to have an RDMA device."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a file system")
    mounted = f"mount -t tmpfs tmpfs /sys/class && mkdir -p /sys/class/infiniband/mlx5_0 && exec {shlex.join(command)}"
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", mounted], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.stdin.close()


def test_tcp_where_rdma_could_be_is_named_by_the_instance_and_by_its_test_handoff(new_instance, monkeypatch):
    producer = new_instance("kv_producer", machines=[machine() | {"rdma_devices": True}])
    monkeypatch.setenv("KVPIPE_DATA_PATH", "tcp")
    with with_rdma_devices(sys.executable, "-m", "tests.doctor_instance", "kv_consumer") as process:
        address = process.stdout.readline().strip()
        facts = asyncio.run(examined_beside(producer, address))
    said, measured = find(facts)
    control = address.partition(",")[2]
    assert {(finding.level, finding.kind) for finding in (said, measured)} == {("problem", "data path")}
    assert said.problem == f"rank 0 of {control} has RDMA devices, and KVPIPE_DATA_PATH=tcp leaves them out"
    assert said.remedy == "take KVPIPE_DATA_PATH out of its environment"
    assert f"reaches {control} over tcp: this machine has RDMA devices, but bytes move over tcp" in measured.problem
    facts.instances[0].workers[0].machine["rdma_devices"] = False
    assert find(facts) == [said], "no RDMA reaches a producer without a device"


def test_tcp_where_rdma_could_be_is_named_on_the_host_of_this_process(new_instance, monkeypatch):
    monkeypatch.setenv("KVPIPE_DATA_PATH", "tcp")
    machines = [machine() | {"rdma_devices": True, "data_path": "auto"}]
    address = new_instance("kv_producer", machines=machines).address
    with with_rdma_devices(sys.executable, "-m", "kvpipe", "doctor", address, "--json") as process:
        report = json.load(process.stdout)
    assert "this machine has RDMA devices, but bytes move over tcp" in only(report, "data path from here")["problem"]


def test_another_hash_seed_is_named_and_is_no_problem(new_instance, doctor):
    producer = new_instance("kv_producer", prefix_hash_seed="7")
    consumer = new_instance("kv_consumer")
    status, report = doctor(producer.address, consumer.address)
    finding = only(report, "hash seed")
    assert (status, finding["level"]) == (0, "note")
    assert finding["problem"] == f"PYTHONHASHSEED differs: '7' at {producer.address}; 'random' at {consumer.address}"


def test_other_versions_are_named_and_are_no_problem_while_fingerprints_agree(new_instance, doctor):
    producer = new_instance("kv_producer", versions={"kvpipe": "0.1.0", "vllm": "0.31.0"})
    status, report = doctor(producer.address, new_instance("kv_consumer").address)
    assert (status, only(report, "version")["level"]) == (0, "note")
    assert "vLLM differs: '0.31.0' at" in only(report, "version")["problem"]


def test_a_producer_that_a_consumer_does_not_allow_is_named(new_instance, doctor):
    producer, consumer = new_instance("kv_producer"), new_instance("kv_consumer")
    consumer.control.allow_checks(["elsewhere"], [])
    status, report = doctor(producer.address, consumer.address)
    assert status == 1
    assert "allowed_producers" in only(report, "pair")["problem"]


def test_instances_of_one_role_are_no_deployment(new_instance, doctor):
    status, report = doctor(*(new_instance("kv_producer").address for _ in range(2)))
    assert (status, only(report, "role")["remedy"]) == (1, 'start one with "kv_role": "kv_consumer", or "kv_both"')


def test_a_loopback_address_for_a_consumer_on_another_host_is_named(new_instance, doctor):
    elsewhere = [{"host": "another boot id", "user": 0, "rdma_devices": False, "data_path": "auto"}]
    producer, consumer = new_instance("kv_producer"), new_instance("kv_consumer", machines=elsewhere)
    status, report = doctor(producer.address, consumer.address)
    assert status == 1
    assert f"advertises {producer.address} to {consumer.address}" in only(report, "address")["problem"]


def test_an_advertised_address_that_a_consumer_does_not_reach_is_named(new_instance, doctor):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        advertised = f"127.0.0.1:{holder.getsockname()[1]}"
        producer, consumer = new_instance("kv_producer", address=advertised), new_instance("kv_consumer")
        status, report = doctor(producer.address, consumer.address)
    finding = only(report, "address")
    assert status == 1
    expected = f"{consumer.address} does not reach {advertised}, which {producer.address} advertises: cannot reach "
    assert finding["problem"].startswith(expected)
    assert "`advertise`" in finding["remedy"]


def test_an_instance_that_has_not_started_yet_is_named(new_instance, doctor):
    starting = new_instance("kv_producer")
    starting.control.describe_as("{}")
    status, report = doctor(starting.address)
    assert (status, only(report, "starting")["instances"]) == (1, [starting.address])


def test_an_instance_of_an_older_release_is_described_as_far_as_it_says(new_instance, doctor, capsys):
    producer = new_instance("kv_producer")
    old = ("engine_id", "role", "ranks", "fingerprint")
    described = doctor(producer.address)[1]["instances"][0]["description"]
    producer.control.describe_as(json.dumps({key: described[key] for key in old}))
    assert main(["doctor", producer.address]) == 0
    assert "kvpipe unknown, vllm unknown" in capsys.readouterr().out


def test_the_address_of_an_agent_is_no_control_port(new_instance, doctor):
    status, report = doctor(new_instance("kv_producer").agent.address)
    assert (status, only(report, "release")["level"]) == (1, "problem")


def test_a_test_handoff_goes_each_way_and_is_announced_before(new_instance):
    both = [new_instance("kv_both") for _ in range(2)]
    lines = []
    facts, found = asyncio.run(examined(*both, announce=lines.append))
    assert found == []
    assert {pair.name: pair.handoff["result"] for pair in facts.pairs} == {
        f"{both[0].address} -> {both[1].address}": "full",
        f"{both[1].address} -> {both[0].address}": "full",
    }
    assert sorted(lines) == sorted(f"test handoff {pair.name}: a prompt of about 33 tokens" for pair in facts.pairs)
    assert text(facts, found).count("accepted; test handoff full, 4096 bytes over cma in ") == 2
    first, second = both[0].bodies
    assert {first["max_tokens"], second["max_tokens"]} == {1}
    assert first["prompt"] != second["prompt"], "a prompt that no prefix cache has"


def test_a_refused_process_vm_readv_between_two_instances_is_named_with_its_remedy(new_instance):
    producer, child = new_instance("kv_producer"), Child("kv_consumer", "refuse", module="tests.doctor_instance")
    address = child.read()
    facts = asyncio.run(examined_beside(producer, address))
    (finding,) = find(facts)
    assert (finding.level, finding.kind) == ("problem", "data path")
    assert finding.instances == (producer.address, address.partition(",")[2])
    assert "over tcp: process_vm_readv" in finding.problem
    assert finding.problem.endswith("allow process_vm_readv in it")
    assert facts.pairs[0].handoff["result"] == "full", "it is only slow"
    child.end()


def test_a_test_handoff_without_kv_is_named_with_its_reason(new_instance):
    producer, consumer = new_instance("kv_producer"), new_instance("kv_consumer")
    consumer.result = {"result": "missing", "reason": "lost peer x: y"}
    _, (finding,) = asyncio.run(examined(producer, consumer))
    assert (finding.level, finding.kind, finding.instances) == (
        "problem",
        "handoff",
        (producer.address, consumer.address),
    )
    assert "is missing: lost peer x: y" in finding.problem


def test_instances_with_tls_and_a_key_are_examined_with_the_files_of_the_proxy(new_instance, tmp_path):
    from tests.proxy.certificates import Authority  # noqa: PLC0415 - its package is needed by this test alone

    certificate = Authority(tmp_path).issue()
    key_file = tmp_path / "key"
    key_file.write_text("of-the-instances\n")
    instances = new_instance("kv_producer"), new_instance("kv_consumer")
    for instance in instances:
        instance.api_key = "of-the-instances"
    examine_with = partial(examined, *instances, ssl_context=certificate.server_context())
    files = {"instances_ca_file": certificate.ca, "instances_api_key_file": key_file}
    facts, found = asyncio.run(examine_with(**files))
    assert (found, [pair.handoff["result"] for pair in facts.pairs]) == ([], ["full"])
    for missing, remedy in (("instances_ca_file", "--instances-ca-file"), ("instances_api_key_file", "VLLM_API_KEY")):
        _, found = asyncio.run(examine_with(**{name: file for name, file in files.items() if name != missing}))
        assert len(found) == 2
        assert all(remedy in finding.problem for finding in found)


def test_an_api_that_fails_is_named(new_instance):
    producer, consumer = new_instance("kv_producer"), new_instance("kv_consumer")
    consumer.status = 500
    facts, (finding,) = asyncio.run(examined(producer, consumer))
    assert finding.kind == "handoff"
    assert "/v1/completions answers 500: it failed" in finding.problem
    assert document(facts, [finding])["ok"] is False


@pytest.mark.parametrize("body", [b"\xff\xfe\x1b[2J", b"[" * 2_000_000], ids=["no text", "too long"])
@pytest.mark.parametrize("status", [200, 500])
def test_a_body_that_is_no_json_is_named(new_instance, body, status):
    producer, consumer = new_instance("kv_producer"), new_instance("kv_consumer")
    consumer.status, consumer.body = status, body
    facts, (finding,) = asyncio.run(examined(producer, consumer))
    assert finding.kind == "handoff"
    assert ("answers no JSON of up to 1048576 bytes" if status == 200 else "answers 500: ") in finding.problem
    assert len(finding.problem) < 600
    assert "\x1b" not in text(facts, [finding])


def test_an_instance_that_was_late_gets_no_other_test_handoffs(new_instance, monkeypatch):
    monkeypatch.setattr(handoffs, "_REQUEST_TIMEOUT_S", 0.5)
    monkeypatch.setattr(handoffs, "_NUM_CONCURRENT", 1)
    producers, consumer = [new_instance("kv_producer") for _ in range(3)], new_instance("kv_consumer")
    consumer.status = None
    facts, (late, skipped) = asyncio.run(examined(*producers, consumer))
    assert len(consumer.bodies) == 1
    assert (late.kind, skipped.kind, skipped.level) == ("handoff", "skipped", "note")
    assert "/v1/completions did not answer within 0.5 s" in late.problem
    reason = f"skipped: {consumer.address} did not answer another test handoff in time"
    assert [pair.skipped for pair in facts.pairs] == ["", reason, reason]
    assert text(facts, [late, skipped]).count(f"accepted; {reason}") == 2


def test_all_test_handoffs_end_together(new_instance, monkeypatch):
    monkeypatch.setattr(handoffs, "_HANDOFFS_TIMEOUT_S", 0.5)
    producer, consumer = new_instance("kv_producer"), new_instance("kv_consumer")
    consumer.status = None
    facts, (finding,) = asyncio.run(examined(producer, consumer))
    assert finding.kind == "skipped"
    assert facts.pairs[0].skipped == "skipped: all test handoffs have 0.5 s together"


def test_an_api_behind_a_closed_port_is_named(new_instance, doctor):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        status, report = doctor(f"http://127.0.0.1:{port},{new_instance('kv_producer').address}")
    assert status == 1
    assert f"http://127.0.0.1:{port}" in only(report, "port")["problem"]


def test_a_clock_that_is_an_hour_off_is_named_and_is_no_problem(new_instance):
    producer = new_instance("kv_producer")
    producer.headers = {"Date": "Thu, 01 Jan 2015 00:00:00 GMT"}
    _, (finding,) = asyncio.run(examined(producer))
    assert (finding.level, finding.kind) == ("note", "clock")
    assert "behind this host's" in finding.problem
    producer.headers = {}
    facts, found = asyncio.run(examined(producer))
    http = facts.instances[0].http
    assert found == []
    assert abs(http.clock_offset_s) <= http.clock_uncertainty_s


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("offset", "is_named"), [(5.49, False), (5.51, True)])
def test_a_clock_is_named_that_is_more_than_5_s_off_for_certain(sign, offset, is_named):
    http = HttpFacts(model="tiny", clock_offset_s=sign * offset, clock_uncertainty_s=0.5)
    instance = InstanceFacts(InstanceAddress("a:1"), description={"role": "kv_both"}, http=http)
    assert [finding.kind for finding in find(Facts([instance]))] == ["clock"] * is_named


@pytest.mark.parametrize(
    ("has_urls", "last"), [(True, "nothing is wrong"), (False, "needs the URLs of both instances")]
)
def test_the_end_says_that_data_paths_were_not_tested(new_instance, capsys, has_urls, last):
    instances = new_instance("kv_producer"), new_instance("kv_consumer")
    if has_urls:
        shown = text(*asyncio.run(examined(*instances)))
    else:
        assert main(["doctor", *(each.address for each in instances)]) == 0
        shown = capsys.readouterr().out
    ending = shown.strip().splitlines()[-1]
    assert last in ending
    assert (ending == "nothing is wrong") == has_urls


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "ADDRESS"),
        (["nonsense"], "address 'nonsense': must be control-host:port"),
        (["http://127.0.0.1:8000"], "add its control port"),
        (["127.0.0.1:1", "--timeout", "0"], "expected seconds above 0"),
    ],
)
def test_wrong_usage_is_status_2_with_the_form(arguments, part, capsys):
    try:
        status = main(["doctor", *arguments])
    except SystemExit as ended:  # argparse's way
        status = ended.code
    assert status == 2
    assert part in capsys.readouterr().err


def test_a_machine_that_hides_its_boot_id_stops_no_engine(monkeypatch, tmp_path):
    monkeypatch.setattr(_machine, "_BOOT_ID", tmp_path)  # a directory: it is there and cannot be read
    assert _machine.machine()["host"] == ""


def test_help_has_examples_and_the_exit_statuses(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    shown = capsys.readouterr().out
    assert "kvpipe doctor 10.0.0.1:7100 10.0.0.3:7200" in shown
    assert "exit status: 0" in shown


def test_the_text_names_each_finding_with_its_remedy(new_instance, capsys):
    producer = new_instance("kv_producer")
    consumer = new_instance("kv_consumer", fingerprint={"dtype": "torch.bfloat16"})
    assert main(["doctor", producer.address, consumer.address]) == 1
    lines = capsys.readouterr().out.splitlines()
    index = next(i for i, line in enumerate(lines) if line.startswith("problem: dtype differs"))
    assert lines[index + 1] == "  remedy: start both with the same --dtype"
    assert "  dtype       torch.float32 | torch.bfloat16  differs" in lines
