"""scripts/mutants: its list fits the code, and it tells what no test catches."""

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests.peers import wait_until

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "scripts/mutants"
LISTED = tomllib.loads((REPOSITORY / "scripts/mutants.toml").read_text())
MUTANTS = [(file, mutant) for file, of_file in LISTED.items() for mutant in of_file]

GUARDS = "guards.rs"
# What stands in for cargo: code with `nonsense` does not compile.
CARGO = """#!/bin/sh
! grep -q nonsense rust/core/src/guards.rs || exit 101
echo '{"reason": "compiler-artifact", "executable": "%s"}'
"""
# And for the tests of the core: one needs the first guard, none the second, and without the third one does not end.
TESTS = """#!/bin/sh
case $1 in nothing) exit 0 ;; esac
grep -q third rust/core/src/guards.rs || { echo $$ >%s; exec sleep 600; }
grep -q first rust/core/src/guards.rs && verdict=ok || verdict=FAILED
echo "test guards::tests::the_first_guard_holds ... $verdict"
[ $verdict = ok ]
"""


@pytest.mark.parametrize(("file", "mutant"), MUTANTS, ids=[mutant["name"] for _, mutant in MUTANTS])
def test_each_mutant_breaks_one_place_of_the_code(file, mutant):
    assert (REPOSITORY / "rust/core/src" / file).read_text().count(mutant["old"]) == 1
    assert mutant["new"] != mutant["old"]


def test_each_mutant_has_a_name_and_a_guard_of_its_own():
    for field in ("name", "guard"):
        values = [mutant[field] for _, mutant in MUTANTS]
        assert sorted(set(values)) == sorted(values)


@pytest.fixture
def repository(tmp_path):
    """One with three guards, and a cargo that needs no time."""
    return Repository(tmp_path)


class Repository:
    def __init__(self, folder):
        self.root, self.bin, self.asked = folder / "repository", folder / "bin", folder / "asked"
        self.tree = self.root / "target/mutants/tree"
        self.bin.mkdir()
        for file, text in (("cargo", CARGO % (self.bin / "tests")), ("tests", TESTS % self.asked)):
            (self.bin / file).write_text(text)
            (self.bin / file).chmod(0o755)
        self.guards = self.root / "rust/core/src" / GUARDS
        self.guards.parent.mkdir(parents=True)
        self.guards.write_text("first\nsecond\nthird\n")
        (self.root / "scripts").mkdir()
        shutil.copy(SCRIPT, self.root / "scripts")
        subprocess.run(["git", "init", "--quiet", self.root], check=True)
        self.list()

    def list(self, *others):
        """Has a mutant of each guard in the list, and these."""
        mutants = [(guard, guard, "") for guard in ("first", "second", "third")]
        for name, old, new, tests in [(*mutant, "guards")[:4] for mutant in [*mutants, *others]]:
            fields = {"name": name, "guard": f"The {name} guard.", "old": old, "new": new, "tests": tests}
            with (self.root / "scripts/mutants.toml").open("a") as file:
                file.write(f'[["{GUARDS}"]]\n' + "".join(f"{key} = {value!r}\n" for key, value in fields.items()))

    def begin(self, *names):
        environment = {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        return subprocess.Popen(
            [sys.executable, self.root / "scripts/mutants", *names], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *names):
        """The exit status, the table and what else was told. The code is as before, and the copy gone."""
        process = self.begin(*names)
        table, told = process.communicate(timeout=60)
        assert self.guards.read_text() == "first\nsecond\nthird\n"
        assert not self.tree.exists()
        return process.returncode, table, told


def test_a_mutant_whose_test_fails_is_caught_by_it(repository):
    status, table, _ = repository.run("first")
    assert status == 0
    assert "| The first guard. | first | guards::tests::the_first_guard_holds |" in table


def test_a_mutant_that_no_test_notices_fails_the_run_and_the_others_are_tried(repository):
    status, table, told = repository.run("first", "second")
    assert status == 1
    assert "| The second guard. | second | SURVIVED 1 tests |" in table
    assert "the_first_guard_holds" in table
    assert "1 of 2 survived" in told


@pytest.mark.parametrize(
    ("mutant", "reason"),
    [
        (("compiles", "first", "nonsense"), "does not compile"),
        (("tests", "first", "", "nothing"), "there are no such tests"),
        (("lost", "fourth", ""), "lost: its old text is 0 times in rust/core/src/guards.rs, not once"),
        (("many", "r", ""), "many: its old text is 2 times in rust/core/src/guards.rs, not once"),
    ],
)
def test_a_mutant_that_cannot_be_tried_fails_the_run(repository, mutant, reason):
    repository.list(mutant)
    status, table, told = repository.run(mutant[0])
    assert (status, table) == (1, "")
    assert reason in told


def test_a_test_that_fails_without_a_mutant_fails_the_run(repository):
    repository.list(("unbroken", "third", ""))
    repository.guards.write_text("second\nthird\n")
    process = repository.begin("second")
    _, told = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "fails without a mutant: guards::tests::the_first_guard_holds" in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_ended_leaves_no_copy_and_no_process(repository, number):
    os.mkfifo(repository.asked)
    process = repository.begin("third")
    test = int(repository.asked.read_text())
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert not repository.tree.exists()
    wait_until(lambda: has_ended(test))


def has_ended(pid):
    """Whether a process of nobody here has ended; init may not have looked at it yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_tests_that_do_not_end_are_ended_and_have_caught_their_mutant(tmp_path, monkeypatch):
    loader = SourceFileLoader("mutants", str(SCRIPT))
    mutants = module_from_spec(spec_from_loader("mutants", loader))
    monkeypatch.setitem(sys.modules, "mutants", mutants)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(mutants)
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    ended = mutants.run(["sleep", "600"], 0.1)
    assert ended.status is None
    outcome = mutants.outcome(ended)
    assert outcome.is_caught
    assert outcome.text.startswith("by time")
