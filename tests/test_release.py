"""One version: Cargo.toml has it, the build shows it, the changelog and the tag of a release agree with it."""

import re
import subprocess
import tomllib

import pytest

import kvpipe
from tests.peers import ROOT

VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]


@pytest.fixture
def repository(tmp_path):
    """A copy of what `scripts/version` reads."""
    (tmp_path / "scripts").mkdir()
    for file in ("scripts/version", "Cargo.toml", "CHANGELOG.md"):
        (tmp_path / file).write_bytes((ROOT / file).read_bytes())
    return tmp_path


def version(repository, *tag):
    command = ["bash", repository / "scripts/version", *tag]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def release(repository):
    changelog = repository / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("## [Unreleased]\n", f"## [{VERSION}] - 2026-01-31\n", 1))


def test_the_build_has_the_version_of_cargo_toml():
    assert kvpipe.__version__ == kvpipe.info()["kvpipe"] == VERSION


def test_each_crate_takes_the_version_of_the_workspace():
    for lock in ("Cargo.lock", "rust/fuzz/Cargo.lock"):
        packages = tomllib.loads((ROOT / lock).read_text())["package"]
        own = {each["version"] for each in packages if re.fullmatch("kvpipe-(ucx|core|py|resp|serde)", each["name"])}
        assert own == {VERSION}, lock


def test_the_changelog_has_releases_in_order_and_none_after_the_version():
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    dated = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:]]
    assert all(dated)
    released = [tuple(map(int, match.groups())) for match in dated]
    assert released == sorted(set(released), reverse=True)
    assert all(each <= tuple(map(int, VERSION.split("."))) for each in released)


def test_a_tag_is_the_version_and_has_a_section_in_the_changelog(repository):
    assert version(repository).stdout == f"{VERSION}\n"
    release(repository)
    done = version(repository, f"v{VERSION}")
    assert (done.returncode, done.stdout) == (0, f"{VERSION}\n")


def test_another_tag_is_refused(repository):
    release(repository)
    done = version(repository, "v99.0.0")
    assert done.returncode == 1
    assert done.stderr == (
        f"version: the tag is v99.0.0, and the version of Cargo.toml is {VERSION}: expected the tag v{VERSION}\n"
    )


def test_a_tag_without_a_section_is_refused(repository):
    done = version(repository, f"v{VERSION}")
    assert done.returncode == 1
    assert done.stderr == (
        f"version: CHANGELOG.md has no section of {VERSION}: expected the line ## [{VERSION}] - YYYY-MM-DD\n"
    )
