"""A program that a zygote forks is what `python -m` starts, and a zygote that must not fork does not."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.peers import wait_until
from tests.zygote import REPOSITORY, Zygote

PROGRAMS = "tests.zygote.programs"


@pytest.fixture(scope="module")
def zygote():
    with Zygote(("json",)) as zygote:
        yield zygote


def run(zygote, *arguments, **options):
    command = [*zygote.command(PROGRAMS), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


def test_a_program_has_the_arguments_environment_folder_output_and_group_of_its_start(zygote, tmp_path):
    done = run(zygote, "facts", "a b", "c", cwd=tmp_path, env=os.environ | {"OF_THE_CLIENT": "x"}, process_group=0)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts.pop("group") not in (0, os.getpgrp())
    assert facts == {"arguments": ["a b", "c"], "variable": "x", "folder": str(tmp_path), "num_descriptors": 3}
    assert done.stderr == "of the program\n"


@pytest.mark.parametrize(("arguments", "status"), [(("exit", "3"), 3), (("exit", "0"), 0), (("die", "9"), -9)])
def test_a_start_ends_as_its_program_does(zygote, arguments, status):
    assert run(zygote, *arguments).returncode == status


def test_a_signal_reaches_the_program(zygote):
    with subprocess.Popen([*zygote.command(PROGRAMS), "wait"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 7


def test_a_client_that_is_killed_before_its_program_was_forked_ends_alone(zygote):
    with Zygote(("tests.zygote.slow",)) as slow:
        with subprocess.Popen([*slow.command(PROGRAMS), "wait"], process_group=0) as process:
            wait_until(lambda: " socket:" in links(process.pid))
            process.kill()
        assert run(slow, "exit", "3").returncode == 3


def links(pid):
    """Targets of the descriptors of a process."""
    found = [""]
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(str(link.readlink()))
    return " ".join(found)


def test_programs_run_side_by_side(zygote):
    command = [*zygote.command(PROGRAMS), "wait"]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in running:
        assert process.stdout.readline() == "waiting\n"
    for process in running:
        with process:
            process.terminate()
            assert process.wait(60) == 7


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("tests.zygote.with_thread", "a process with threads must not fork"),
        ("tests.zygote.with_cuda", "a context of CUDA does not survive a fork"),
    ],
)
def test_a_zygote_with_a_second_task_or_a_context_of_cuda_does_not_fork(module, reason):
    with Zygote((module,)) as zygote:
        done = run(zygote, "exit", "0")
    assert done.returncode == 1
    assert reason in done.stderr


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "OMP_NUM_THREADS"])
def test_a_program_with_another_variable_that_is_read_at_import_is_refused_by_name(zygote, name):
    done = run(zygote, "exit", "0", env=os.environ | {name: "5"})
    assert done.returncode == 1
    assert f"{name} is read at import" in done.stderr


def test_a_zygote_ends_when_its_owner_is_killed():
    code = (
        "import time\n"
        "from tests.zygote import Zygote\n"
        "with Zygote(('json',)) as zygote:\n"
        "    print(zygote._process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stdout=subprocess.PIPE) as owner:
        pid = int(owner.stdout.readline())
        owner.kill()
    wait_until(lambda: has_ended(pid))


def has_ended(pid):
    """True if a process has ended whose parent has, too; init may not have reaped it yet."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
