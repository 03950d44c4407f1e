"""The pack: its sizes, its limit, and what it is given."""

import json
import os

import pytest
from gpu_vllm import packing

MIB = packing.MIB
# Random, so that the archive has as many.
B_BYTES = MIB


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A pack with two parts, and the sizes of all."""
    site, folder = (tmp_path_factory.mktemp(name) for name in ("site", "pack"))
    (site / "a.py").write_text("a = 1\n")
    (site / "b.so").write_bytes(os.urandom(B_BYTES))
    parts = packing.fill(folder, site, {"Python files": [site / "a.py"], "b": [site / "b.so"]})
    return folder, parts


def test_a_pack_has_the_archive_the_programs_and_the_commit(filled, tmp_path):
    folder, _ = filled
    assert {"vllm.tar.xz", "vllm.json", "gpu-check", "gpu_vllm"} == {file.name for file in folder.iterdir()}
    assert json.loads((folder / "vllm.json").read_text())["commit"] == packing.commit()
    packing.unpack(folder / "vllm.tar.xz", tmp_path / "unpacked")
    assert (tmp_path / "unpacked/a.py").read_text() == "a = 1\n"
    assert (tmp_path / "unpacked/b.so").stat().st_size == B_BYTES


def test_the_sizes_of_its_parts_are_those_of_all_that_travels(filled):
    folder, parts = filled
    sizes = {part.name: part.num_bytes for part in parts}
    assert sizes.pop("the repository's tracked files") == packing.tracked_bytes() > MIB
    assert sum(sizes.values()) == sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert MIB // 2 < sizes["b"] <= B_BYTES
    assert {"Python files", "b", "the end of the archive", "programs of the check"} == set(sizes)


@pytest.mark.parametrize(
    ("limit", "status", "verdict"), [(3.0, 0, "3.00 MiB in all, of 3 MiB"), (2.9, 1, "over 2.9 MiB")]
)
def test_it_says_the_size_of_each_part_and_fails_over_the_limit_with_the_sum(limit, status, verdict):
    said = []
    parts = [packing.Part("vLLM", 2 * MIB), packing.Part("kvpipe", MIB)]
    assert packing.judged(parts, int(limit * MIB), "1 s", said.append) == status
    assert said[:2] == ["   2.00 MiB  vLLM", "   1.00 MiB  kvpipe"]
    assert said[2].startswith("3.00 MiB in all")
    assert verdict in said[2]


def test_a_folder_with_other_files_is_not_removed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(SystemExit, match=r"thesis\.tex, which is no part of a pack"):
        packing.pack(tmp_path, MIB, print)
    assert (tmp_path / "thesis.tex").exists()


def test_a_program_that_is_missing_is_named_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SystemExit, match=r"not installed: git \(git\), strip \(binutils\), cargo \(rustup\), cc \(gcc\)"
    ):
        packing.pack(tmp_path / "pack", MIB, print)


def test_no_file_of_the_check_names_a_package_index_or_a_place_of_one_machine():
    files = [*packing.HERE.iterdir(), packing.ROOT / "scripts/gpu-check"]
    texts = {file.name: file.read_text() for file in files if file.is_file()}
    assert {"packages.txt", "packing.py", "gpu-check"} <= texts.keys()
    named = ("index-url", "://pypi", "/simple", "/home/", "/root/", "/work/", "/usr/local/")
    assert [(name, each) for name, text in texts.items() for each in named if each in text] == []
