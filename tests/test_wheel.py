"""The distributions of a release: tags, content, size, licences, and their use in otherwise empty environments.

The wheel for this machine is built by `scripts/wheel`. `make dist` builds all, and names their folder in KVPIPE_DIST.
"""

import os
import platform
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.extras import COMMANDS

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
TORCH_WHEELS = REPOSITORY / "../shared/wheels"
UV = Path(sys.executable).with_name("uv")
DOCKERFILE = REPOSITORY / "examples" / "containers" / "Dockerfile"
DIST = os.environ.get("KVPIPE_DIST")

NATIVE = platform.machine()
ARCHITECTURES = ("x86_64", "aarch64")
THIS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
GLIBC = (2, 28)
LIBRARIES = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "libgcc_s.so.1"}
LOADERS = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
MAX_BYTES = 5_000_000


@pytest.fixture(scope="module")
def dist():
    """The folder with the distributions."""
    if DIST:
        return Path(DIST)
    subprocess.run([REPOSITORY / "scripts/wheel"], check=True)
    return REPOSITORY / "dist"


@pytest.fixture(scope="module")
def wheel(dist):
    """The wheel for this machine."""
    return wheel_for(dist, NATIVE)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def any_wheel(dist, request):
    """Architecture and wheel."""
    if request.param != NATIVE and not (DIST and any(dist.glob(f"*_{request.param}.whl"))):
        pytest.skip(f"make dist builds the wheel for {request.param}")
    return request.param, wheel_for(dist, request.param)


@pytest.fixture(scope="module")
def sdist(dist):
    """Names and contents of the files of the source distribution."""
    if not DIST:
        pytest.skip("make dist builds the source distribution")
    [file] = dist.glob("kvpipe-*.tar.gz")
    with tarfile.open(file) as content:
        files = [member for member in content if member.isfile()]
        return {member.name.partition("/")[2]: content.extractfile(member).read() for member in files}


def wheel_for(dist, arch):
    [wheel] = dist.glob(f"kvpipe-*_{arch}.whl")
    return wheel


def test_the_tag_is_cpython_3_11_abi3_and_glibc_2_28(any_wheel):
    arch, wheel = any_wheel
    tag = f"cp311-abi3-manylinux_2_28_{arch}"
    assert wheel.stem.split("-", 2)[2] == tag
    with zipfile.ZipFile(wheel) as content:
        [metadata] = [name for name in content.namelist() if name.endswith(".dist-info/WHEEL")]
        assert f"Tag: {tag}" in content.read(metadata).decode().splitlines()


def test_a_wheel_has_at_most_5_mb(any_wheel):
    _, wheel = any_wheel
    assert wheel.stat().st_size <= MAX_BYTES


@pytest.fixture(scope="module")
def headers(any_wheel, tmp_path_factory):
    """Architecture, file header, dynamic section and required symbol versions of the extension."""
    arch, wheel = any_wheel
    with zipfile.ZipFile(wheel) as content:
        extension = content.extract("kvpipe/_kvpipe.abi3.so", tmp_path_factory.mktemp("wheel"))
    return arch, run("readelf", "--wide", "--file-header", "--dynamic", "--version-info", extension)


def test_the_extension_is_for_the_architecture_of_the_tag(headers):
    arch, text = headers
    assert re.search(r"Machine: .*", text)[0].lower().replace("-", "_").endswith(arch)


def test_the_extension_links_glibc_and_libgcc_s_only(headers):
    arch, text = headers
    needed = set(re.findall(r"\(NEEDED\) .*\[(\S+)\]", text))
    assert "libc.so.6" in needed
    assert needed <= LIBRARIES | {LOADERS[arch]}, "libucp is loaded at run time, all else is linked statically"


def test_the_extension_unwinds_with_libgcc_s_as_glibc_does(headers):
    """With a second unwinder, the process crashes when it exits while daemon threads wait in the extension."""
    assert "File: libgcc_s.so.1 " in headers[1]


def test_the_extension_needs_no_glibc_after_2_28(headers):
    versions = re.findall(r"\bGLIBC_([\d.]+)", headers[1])
    assert max(tuple(map(int, version.split("."))) for version in versions) <= GLIBC


def test_it_contains_the_package_with_stubs_and_licences_and_nothing_else(any_wheel):
    python = REPOSITORY / "python"
    sources = [path for path in python.rglob("*") if path.suffix in {".py", ".pyi", ".typed"}]
    package = {str(path.relative_to(python)) for path in sources} | {"kvpipe/_kvpipe.abi3.so"}
    with zipfile.ZipFile(any_wheel[1]) as content:
        names = set(content.namelist())
        metadata = {name.partition(".dist-info/")[2]: content.read(name) for name in names if ".dist-info/" in name}
    assert {"kvpipe/_kvpipe.pyi", "kvpipe/py.typed"} <= package
    assert {name for name in names if ".dist-info/" not in name} == package
    licences = {name.partition("/")[2]: text for name, text in metadata.items() if name.startswith("licenses/")}
    assert licences == {name: (REPOSITORY / name).read_bytes() for name in ("LICENSE", "THIRD-PARTY.txt")}


def test_the_source_distribution_has_what_a_build_needs_and_nothing_of_one(sdist):
    tracked = set(run("git", "-C", REPOSITORY, "ls-files").splitlines())
    assert sdist.keys() - tracked == {"PKG-INFO"}
    kernels = {name for name in tracked if name.endswith(".ptx")}
    assert kernels
    assert sdist.keys() >= {"Cargo.lock", "LICENSE", "README.md", "THIRD-PARTY.txt", "pyproject.toml", *kernels}
    assert {name for name in tracked if name.startswith("python/")} <= sdist.keys()
    assert {name.partition("/")[0] for name in sdist} & {"bench", "docs", "examples", "scripts", "tests"} == set()


def test_the_source_distribution_has_the_lock_of_the_crates(sdist):
    def versions(text):
        packages = tomllib.loads(text)["package"]
        return {(package["name"], package["version"]) for package in packages if "source" in package}

    assert versions(sdist["Cargo.lock"].decode()) <= versions((REPOSITORY / "Cargo.lock").read_text())


def test_it_has_no_benchmarks_and_says_where_they_are(wheel, tmp_path):
    with zipfile.ZipFile(wheel) as content:
        assert [name for name in content.namelist() if "bench" in name] == []
    environment = make_environment(tmp_path, THIS_PYTHON)
    install(environment, wheel)
    refused = kvpipe(environment, tmp_path, "bench", "pipe")
    assert "clone it, and run `kvpipe bench` in its folder" in refused


@pytest.mark.parametrize("version", PYTHONS)
def test_info_and_the_example_run_with_numpy_alone(wheel, tmp_path, version):
    environment = make_environment(tmp_path, version)
    install(environment, f"{wheel}[ucx-cu12]", "numpy")
    assert f"ucx_path: {environment}/" in run(environment / "bin/kvpipe", "info")
    assert run_example(environment) == [f"received float32 (4194304,), all {number}" for number in range(4)]


def test_the_example_runs_with_torch_and_without_ucx(wheel, tmp_path):
    pattern = f"torch-*+cpu-cp{THIS_PYTHON.replace('.', '')}-*.whl"
    torch = next(TORCH_WHEELS.glob(pattern), None)
    if torch is None:
        pytest.skip(f"no {pattern} in ../shared/wheels")
    environment = make_environment(tmp_path, THIS_PYTHON)
    install(environment, wheel, torch)
    assert "ucx: None" in run(environment / "bin/kvpipe", "info").splitlines()
    command = [environment / "bin/python", REPOSITORY / "examples/two_processes.py"]
    refused = subprocess.run(command, env={}, capture_output=True, text=True, timeout=100, check=False)
    assert "numpy, which is not installed: pip install numpy" in refused.stderr
    install(environment, "numpy")
    assert run_example(environment) == [f"received torch.float32 (4194304,), all {number}" for number in range(4)]


@pytest.mark.parametrize("version", PYTHONS)
def test_a_store_runs_with_the_wheel_alone(wheel, tmp_path, version):
    environment = make_environment(tmp_path, version)
    install(environment, wheel)
    code = (
        "from kvpipe.store import StoreServer, open_store\n"
        "with StoreServer('127.0.0.1:0', capacity_bytes=1 << 20) as server, open_store(server.url) as store:\n"
        "    store.put(b'key', b'value')\n"
        "    print(store.exists([b'key', b'other']))\n"
    )
    assert run(environment / "bin/python", "-c", code) == "[True, False]\n"


@pytest.mark.parametrize("extra", COMMANDS)
def test_the_extra_that_a_command_names_is_all_that_it_needs(wheel, tmp_path, extra):
    environment = make_environment(tmp_path, THIS_PYTHON)
    install(environment, wheel)
    for command in COMMANDS[extra]:
        done = kvpipe(environment, tmp_path, *command)
        assert f"is not installed; pip install 'kvpipe[{extra}]'\n" in done
    install(environment, f"{wheel}[{extra}]")
    for command in COMMANDS[extra]:
        done = kvpipe(environment, tmp_path, *command)
        assert done.startswith("error: ")
        assert "pip install 'kvpipe[" not in done


def test_the_steps_of_the_container_image_run_in_an_empty_environment(wheel, tmp_path):
    """As root, with file systems of their own over the folders that they write."""
    if os.geteuid() != 0:
        pytest.skip("mounts need root")
    environment = make_environment(tmp_path, THIS_PYTHON)
    steps = [line.partition(" ")[::2] for line in DOCKERFILE.read_text().replace("\\\n", "").splitlines()]
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("KVPIPE_", "PYTHON"))}
    variables["PATH"] = os.pathsep.join([str(environment / "bin"), str(UV.parent), os.environ["PATH"]])
    for kind, text in steps:
        if kind in {"ARG", "ENV"}:
            variables |= dict(word.split("=", 1) for word in shlex.split(text))
    [(mount, step)] = [text.split(maxsplit=1) for kind, text in steps if kind == "RUN"]
    assert mount == "--mount=type=bind,target=/mnt/dist"
    over = "mount -t tmpfs none /var/cache; mount -t tmpfs none /mnt; mkdir /mnt/dist; mount --bind $0 /mnt/dist"
    program = f'{over}; {step} && kvpipe proxy --help && stat -c "owner %u:%g %a" $HOME'
    command = ["unshare", "--mount", "sh", "-ec", program, wheel.parent]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, timeout=300, check=True)
    assert f"ucx_path: {environment}/" in done.stdout
    assert "owner 2000:0 775" in done.stdout


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


def kvpipe(environment, folder, *arguments):
    """Returns what the command writes to stderr when it fails."""
    command = [environment / "bin/kvpipe", *arguments]
    done = subprocess.run(command, cwd=folder, env={}, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


def run_example(environment):
    """Returns the line for each tensor. The last line names the transport, which depends on the kernel."""
    *received, total = run(environment / "bin/python", REPOSITORY / "examples/two_processes.py").splitlines()
    assert total.startswith("5 tensors, 67,108,864 bytes over ")
    return received


def run(*command):
    """Runs a command without the variables of this process, which could name another kvpipe or UCX."""
    env = {"PATH": os.environ["PATH"]}
    return subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=100, check=True).stdout
