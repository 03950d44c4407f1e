"""Packs vLLM's CUDA build, the packages it needs and kvpipe into one archive, for a machine with torch and no network.

`gpu-check --pack FOLDER --vllm` downloads the official wheel, leaves out what a Llama on one GPU does not load, and
zeroes the device code of other GPUs. Nothing is built but kvpipe's wheel.
"""

import fnmatch
import json
import lzma
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from gpu_vllm import fatbin

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ARCHIVE, FACTS = "vllm.tar.xz", "vllm.json"
_PACKED = {ARCHIVE, FACTS, "gpu-check", "gpu_vllm"}
VLLM = "vllm==0.32.0"
UCX = "libucx-cu13==1.22.0"
PYTHON = "3.12"
ARCHITECTURE = 90
MIB = 1 << 20
# A dictionary that reaches from one copy of a library to the next, and from one Python file to one like it.
_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 64 * MIB}]
_PLATFORMS = ("manylinux1", "manylinux2010", "manylinux2014", *(f"manylinux_2_{minor}" for minor in range(5, 40)))

# vLLM's files that no step loads: kernels for other models, whose imports it suppresses; headers; benchmarks; its front
# end in Rust.
_NOT_OF_VLLM = (
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/benchmarks/*",
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/_moe_C*",
    "vllm/_qutlass_C*",
    "vllm/_flashmla*_C*",
    "vllm/_flashkda_C*",
    "vllm/_deepselect_C*",
    "vllm/model_executor/layers/fused_moe/configs/*",
    "vllm/model_executor/layers/quantization/utils/configs/*",
    "vllm/entrypoints/serve/instrumentator/static/*",
)
_NOT_OF_UCX = ("*.a", "*.la", "libucx/bin/*", "libucx/include/*", "libucx/share/*", "*perftest*", "*/cmake/*")
# Data of packages that only other tokenizers and a country's name need, and debug information.
_NOT_OF_PACKAGES = ("*/tests/*", "pycountry/locales/*", "mistral_common/data/*", "*.pyi", "*/sboms/*")


class Part(NamedTuple):
    """A part of the pack, as it travels."""

    name: str
    num_bytes: int

    def __str__(self) -> str:
        """A row of the table of sizes."""
        return f"{self.num_bytes / MIB:7.2f} MiB  {self.name}"


def pack(folder: Path, limit_bytes: int, say: Callable[[str], None]) -> int:
    """Fills a folder with the archive, the programs and the facts; returns the exit status.

    Args:
        folder: The folder. An older pack in it is removed first.
        limit_bytes: The most that the folder and the repository's tracked files may have together.
        say: Called with each line of progress.

    Raises:
        SystemExit: The folder has other files, or a program is missing.
    """
    began = time.monotonic()
    others = {each.name for each in folder.iterdir()} - _PACKED if folder.exists() else set()
    if others:
        raise SystemExit(f"gpu-check: {folder} has {min(others)}, which is no part of a pack: give a new folder")
    if missing := missing_programs():
        raise SystemExit(f"gpu-check: not installed: {', '.join(missing)}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        groups = _unpacked(scratch, _built_wheel(), say)
        say("compressing")
        parts = fill(folder, scratch / "site", groups)
    return judged(parts, limit_bytes, f"{time.monotonic() - began:.0f} s", say)


def fill(folder: Path, site: Path, groups: Mapping[str, Sequence[Path]]) -> list[Part]:
    """Writes the archive, the programs and the facts into a folder; returns the size of each part.

    Args:
        folder: The folder, which exists.
        site: What the archive is unpacked to.
        groups: The files of each part, below `site`.
    """
    parts = _compressed(folder / ARCHIVE, site, groups)
    for program in (HERE.parent / "gpu-check", *sorted(HERE.glob("*.py"))):
        target = folder / program.relative_to(HERE.parent)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(program, target)
    facts = {"commit": commit(), "vllm": VLLM, "ucx": UCX, "architecture": ARCHITECTURE, "python": PYTHON}
    (folder / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    programs = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file() and file.name != ARCHIVE)
    return [*parts, Part("programs of the check", programs), Part("the repository's tracked files", tracked_bytes())]


def missing_programs() -> list[str]:
    """The programs that packing needs and that are not here, with the package of each."""
    needed = {"git": "git", "strip": "binutils", "cargo": "rustup", "cc": "gcc"}
    return [f"{program} ({package})" for program, package in needed.items() if shutil.which(program) is None]


def judged(parts: Sequence[Part], limit_bytes: int, took: str, say: Callable[[str], None]) -> int:
    """Prints the size of each part and their sum; returns 1 if that is over the limit."""
    for part in parts:
        say(str(part))
    total = sum(part.num_bytes for part in parts)
    limit = f"{limit_bytes / MIB:g} MiB"
    if total > limit_bytes:
        say(f"{total / MIB:.2f} MiB in all, which is over {limit}")
        return 1
    say(f"{total / MIB:.2f} MiB in all, of {limit}, in {took}")
    return 0


def commit() -> str:
    """The commit of the checkout, `-dirty` if its tracked files are changed."""
    return _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*").strip()


def tracked_bytes() -> int:
    """The bytes of the repository's tracked files."""
    files = [ROOT / name for name in _git("ls-files", "-z").split("\0") if name]
    return sum(file.lstat().st_size for file in files if file.exists())


def _git(*arguments: str) -> str:
    return subprocess.run(  # noqa: S603 - git, by its name
        ["git", "-C", str(ROOT), *arguments],  # noqa: S607
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def _built_wheel() -> Path:
    subprocess.run([ROOT / "scripts/wheel"], cwd=ROOT, check=True)  # noqa: S603 - our own
    [wheel] = (ROOT / "dist").glob(f"kvpipe-*_{platform.machine()}.whl")
    return wheel


def _unpacked(scratch: Path, wheel: Path, say: Callable[[str], None]) -> dict[str, list[Path]]:
    """Unpacks all wheels into `site`, slimmed; returns the files of each part in the order of the archive."""
    site, wheels = scratch / "site", scratch / "wheels"
    say("downloading")
    _download(wheels / "vllm", [VLLM])
    _download(wheels / "ucx", [UCX])
    _download(wheels / "packages", ["-r", str(HERE / "packages.txt")])
    own = _extracted([wheel], site, ("*/sboms/*", "*.pyi"))
    packages = _extracted(sorted((wheels / "packages").glob("*.whl")), site, _NOT_OF_PACKAGES)
    ucx = _extracted((wheels / "ucx").glob("*.whl"), site, _NOT_OF_UCX)
    vllm = _extracted((wheels / "vllm").glob("*.whl"), site, _NOT_OF_VLLM)
    own += [*benchmarks(site), Path(shutil.copy(ROOT / "examples/disagg_prefill/tiny_model.py", site))]
    say("slimming")
    for file in vllm:
        if file.suffix == ".so":
            data = bytearray(file.read_bytes())
            if fatbin.slim(data, ARCHITECTURE):
                file.write_bytes(data)
    _strip([file for file in (*packages, *ucx) if ".so" in file.suffixes or file.suffix == ".so"])
    native = [file for file in vllm if file.suffix == ".so"]
    return {
        "vLLM's Python files": sorted(set(vllm) - set(native), key=_kind),
        **{f"vLLM's {file.name}": [file] for file in sorted(native)},
        "packages that are missing there": sorted(packages, key=_kind),
        UCX: sorted(ucx),
        "kvpipe": sorted(own, key=_kind),
    }


def _download(folder: Path, wanted: Sequence[str]) -> None:
    """Downloads wheels of Python 3.12 by the user's own pip, index and proxy included."""
    machine = [f"--platform={name}_x86_64" for name in _PLATFORMS]
    options = [
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        f"--python-version={PYTHON}",
    ]
    command = [sys.executable, "-m", "pip", "download", *options, "--implementation=cp", *machine, "--dest"]
    subprocess.run([*command, str(folder), *wanted], check=True)  # noqa: S603 - pip


def _extracted(wheels: Iterable[Path], site: Path, left_out: Sequence[str]) -> list[Path]:
    """Extracts wheels into `site` without what `left_out` matches; returns the files."""
    files = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                name = _place(member.filename)
                if member.is_dir() or any(fnmatch.fnmatch(name, pattern) for pattern in left_out):
                    continue
                file = site / name
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(archive.read(member))
                file.chmod(member.external_attr >> 16 & 0o777 or 0o644)
                files.append(file)
    return files


def benchmarks(site: Path) -> list[Path]:
    """Copies the checkout's package `bench` into `site`, because steps import it; returns the copies."""
    copied = Path(shutil.copytree(ROOT / "bench", site / "bench", ignore=shutil.ignore_patterns("__pycache__", "*.md")))
    return [file for file in copied.rglob("*") if file.is_file()]


def _place(name: str) -> str:
    """The place of a wheel's file in the folder: what a wheel installs by `.data` is put beside the rest."""
    first, _, rest = name.partition("/")
    return rest.partition("/")[2] if first.endswith(".data") else name


def _strip(files: Iterable[Path]) -> None:
    for file in files:
        command = ["strip", "--strip-unneeded", str(file)]
        subprocess.run(command, check=False, stderr=subprocess.DEVNULL)  # noqa: S603 - binutils', by its name


def _kind(file: Path) -> tuple[str, str]:
    """Files alike lie together, which compresses them better."""
    return file.suffix, str(file)


def _compressed(archive: Path, site: Path, groups: Mapping[str, Sequence[Path]]) -> list[Part]:
    """Writes the archive; a part's size is what it has added to it, up to what the encoder held back."""
    parts = []
    with archive.open("wb") as file:
        with (
            lzma.open(file, "wb", format=lzma.FORMAT_XZ, filters=_FILTERS) as stream,
            tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar,
        ):
            for name, members in groups.items():
                before = file.tell()
                for member in _once(members):
                    tar.add(member, member.relative_to(site), filter=_plain)
                parts.append(Part(name, file.tell() - before))
        rest = file.tell() - sum(part.num_bytes for part in parts)
    return [*parts, Part("the end of the archive", rest)]


def _once(files: Iterable[Path]) -> Iterator[Path]:
    """The files, each once: where two packages have the same file the later one has overwritten it."""
    return iter(dict.fromkeys(files))


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """A member without names and times of this machine."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


def unpack(archive: Path, site: Path) -> None:
    """Unpacks the archive there."""
    with tarfile.open(archive, "r:xz") as tar:
        # The first releases of Python 3.11 have no filters.
        if hasattr(tarfile, "data_filter"):
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(site)  # noqa: S202 - made by `pack`
