"""The wheel that `scripts/wheel` builds: its tag, its content, and its use in otherwise empty environments."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
TORCH_WHEELS = REPOSITORY / "../shared/wheels"
UV = Path(sys.executable).with_name("uv")

TAG = "cp311-abi3-manylinux_2_28_x86_64"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
GLIBC = (2, 28)
LIBRARIES = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "ld-linux-x86-64.so.2", "libgcc_s.so.1"}


@pytest.fixture(scope="module")
def wheel():
    subprocess.run([REPOSITORY / "scripts/wheel"], check=True)
    [wheel] = (REPOSITORY / "dist").glob("kvpipe-*.whl")
    return wheel


def test_the_tag_is_cpython_3_11_abi3_and_glibc_2_28(wheel):
    assert wheel.stem.split("-", 2)[2] == TAG
    with zipfile.ZipFile(wheel) as content:
        [metadata] = [name for name in content.namelist() if name.endswith(".dist-info/WHEEL")]
        assert f"Tag: {TAG}" in content.read(metadata).decode().splitlines()


@pytest.fixture(scope="module")
def headers(wheel, tmp_path_factory):
    """The dynamic section and the required symbol versions of the extension."""
    with zipfile.ZipFile(wheel) as content:
        extension = content.extract("kvpipe/_kvpipe.abi3.so", tmp_path_factory.mktemp("wheel"))
    return run("objdump", "--private-headers", extension)


def test_the_extension_links_glibc_and_libgcc_s_only(headers):
    needed = set(re.findall(r"NEEDED +(\S+)", headers))
    assert "libc.so.6" in needed
    assert needed <= LIBRARIES, "libucp is loaded at run time, all else is linked statically"


def test_the_extension_unwinds_with_libgcc_s_as_glibc_does(headers):
    """With a second unwinder, the process crashes when it exits while daemon threads wait in the extension."""
    assert "required from libgcc_s.so.1:" in headers


def test_the_extension_needs_no_glibc_after_2_28(headers):
    versions = re.findall(r"\bGLIBC_(\S+)", headers)
    assert max(tuple(map(int, version.split("."))) for version in versions) <= GLIBC


def test_it_contains_the_package_with_stubs_and_licence_and_nothing_else(wheel):
    python = REPOSITORY / "python"
    sources = [path for path in python.rglob("*") if path.suffix in {".py", ".pyi", ".typed"}]
    package = {str(path.relative_to(python)) for path in sources} | {"kvpipe/_kvpipe.abi3.so"}
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    metadata = {name for name in names if ".dist-info/" in name}
    assert {"kvpipe/_kvpipe.pyi", "kvpipe/py.typed"} <= package
    assert names - metadata == package
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in metadata)


def test_it_has_no_benchmarks_and_says_where_they_are(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as content:
        assert [name for name in content.namelist() if "bench" in name] == []
    environment = make_environment(tmp_path, f"{sys.version_info.major}.{sys.version_info.minor}")
    install(environment, wheel)
    command = [environment / "bin/kvpipe", "bench", "pipe"]
    refused = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, timeout=100, check=False)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "clone it, and run `kvpipe bench` in its folder" in refused.stderr


@pytest.mark.parametrize("version", PYTHONS)
def test_info_and_the_example_run_with_numpy_alone(wheel, tmp_path, version):
    environment = make_environment(tmp_path, version)
    install(environment, f"{wheel}[ucx-cu12]", "numpy")
    assert f"ucx_path: {environment}/" in run(environment / "bin/kvpipe", "info")
    assert run_example(environment) == [f"received float32 (4194304,), all {number}" for number in range(4)]


def test_the_example_runs_with_torch(wheel, tmp_path):
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    pattern = f"torch-*+cpu-cp{version.replace('.', '')}-*.whl"
    torch = next(TORCH_WHEELS.glob(pattern), None)
    if torch is None:
        pytest.skip(f"no {pattern} in ../shared/wheels")
    environment = make_environment(tmp_path, version)
    install(environment, f"{wheel}[ucx-cu12]", "numpy", torch)
    assert run_example(environment) == [f"received torch.float32 (4194304,), all {number}" for number in range(4)]


def make_environment(folder, version):
    find = [UV, "python", "find", "--no-python-downloads", version]
    python = subprocess.run(find, capture_output=True, text=True, check=False)
    if python.returncode:
        pytest.skip(f"no Python {version} found")
    environment = folder / "environment"
    subprocess.run([python.stdout.strip(), "-m", "venv", "--without-pip", environment], check=True)
    return environment


def install(environment, *packages):
    subprocess.run([UV, "pip", "install", "--quiet", "--python", environment / "bin/python", *packages], check=True)


def run_example(environment):
    """Returns the line for each tensor. The last line names the transport, which depends on the kernel."""
    *received, total = run(environment / "bin/python", REPOSITORY / "examples/two_processes.py").splitlines()
    assert total.startswith("5 tensors, 67,108,864 bytes over ")
    return received


def run(*command):
    """Runs a command without the variables of this process, which could name another kvpipe or UCX."""
    env = {"PATH": os.environ["PATH"]}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=100, check=True).stdout
