"""scripts/mutants: its list fits the code, and it tells what no test catches."""

import os
import shutil
import signal
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

from tests.peers import wait_until

REPOSITORY = Path(__file__).parents[1]
SCRIPT = REPOSITORY / "scripts/mutants"


def load_script():
    loader = SourceFileLoader("mutants", str(SCRIPT))
    script = sys.modules["mutants"] = module_from_spec(spec_from_loader("mutants", loader))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        loader.exec_module(script)
    return script


mutants = load_script()
MUTANTS = mutants.mutants()

GUARDS, PYTHON_GUARDS = "guards.rs", "guards.py"
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
# Those of Python: one needs the first guard, none the second.
PYTHON_TESTS = """
import runpy

GUARDS = runpy.run_path("python/kvpipe/guards.py")

def test_the_first_guard_holds():
    assert GUARDS["first"]
"""


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_each_mutant_breaks_one_place_of_the_code(mutant):
    assert mutant.num_places(REPOSITORY) == 1
    assert mutant.new != mutant.old


@pytest.mark.parametrize("mutant", [mutant for mutant in MUTANTS if mutant.is_python], ids=lambda mutant: mutant.name)
def test_each_mutant_in_python_is_valid_and_names_tests_that_are_there(mutant):
    text = (REPOSITORY / mutant.file).read_text()
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")
    file, _, test = mutant.tests.partition("::")
    assert f"def {test.partition('[')[0] or 'test_'}" in (REPOSITORY / file).read_text()


def test_each_mutant_has_a_name_and_a_guard_of_its_own():
    for field in ("name", "guard"):
        values = [getattr(mutant, field) for mutant in MUTANTS]
        assert sorted(set(values)) == sorted(values)


@pytest.fixture
def repository(tmp_path):
    """One with three guards in Rust, with a cargo that needs no time, and two in Python."""
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
        (self.root / "python/kvpipe").mkdir(parents=True)
        (self.root / "python/kvpipe" / PYTHON_GUARDS).write_text("first = True\nsecond = True\n")
        (self.root / "tests").mkdir()
        (self.root / "tests/test_guards.py").write_text(PYTHON_TESTS)
        (self.root / "scripts").mkdir()
        shutil.copy(SCRIPT, self.root / "scripts")
        subprocess.run(["git", "init", "--quiet", self.root], check=True)
        self.list(*((guard, guard, "") for guard in ("first", "second", "third")))
        python = [(f"python-{guard}", f"{guard} = True", f"{guard} = False") for guard in ("first", "second")]
        self.list(*python, file=PYTHON_GUARDS, tests="tests/test_guards.py")

    def list(self, *mutants, file=GUARDS, tests="guards"):
        """Adds mutants of a file to the list, with a name, the old and the new text, and maybe other tests."""
        for name, old, new, *others in mutants:
            fields = {
                "name": name,
                "guard": f"The {name} guard.",
                "old": old,
                "new": new,
                "tests": [tests, *others][-1],
            }
            with (self.root / "scripts/mutants.toml").open("a") as listed:
                listed.write(f'[["{file}"]]\n' + "".join(f"{key} = {value!r}\n" for key, value in fields.items()))

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


def test_mutants_in_python_are_tried_with_pytest(repository):
    status, table, _ = repository.run("python-first", "python-second")
    assert status == 1
    assert "| The python-first guard. | python-first | tests/test_guards.py::test_the_first_guard_holds |" in table
    assert "| The python-second guard. | python-second | SURVIVED 1 tests |" in table


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


def test_a_signal_while_a_process_is_started_ends_that_one_too(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    started = []

    class Popen(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            started.append(self)
            mutants.SIGNALS.handle(signal.SIGINT, None)

    monkeypatch.setattr(subprocess, "Popen", Popen)
    with pytest.raises(SystemExit) as ended:
        mutants.run(["sleep", "600"])
    assert ended.value.code == 128 + signal.SIGINT
    assert started[0].returncode == -signal.SIGKILL


def has_ended(pid):
    """Whether a process of nobody here has ended; init may not have looked at it yet."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_tests_that_do_not_end_are_ended_and_have_caught_their_mutant(tmp_path, monkeypatch):
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    ended = mutants.run(["sleep", "600"], 0.1)
    assert ended.status is None
    outcome = mutants.outcome(ended)
    assert outcome.is_caught
    assert outcome.text.startswith("by time")
