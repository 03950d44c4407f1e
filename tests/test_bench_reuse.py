"""`kvpipe bench store --vllm`: what is measured in a round, and what its rows say. A stand-in takes vLLM's place."""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("aiohttp")

from bench import command as bench
from bench import machine, transports
from bench.handoff.run import report as run_report
from bench.instances import vllm
from bench.instances.servers import Server, ServerPool
from bench.processes import SubjectError
from bench.results import Findings
from bench.reuse import command, run
from bench.reuse.run import Ask, Reuse, Rounds
from bench.reuse.subjects import (
    NO_STORE,
    Contents,
    NoContents,
    Setting,
    StoreContents,
    Subject,
    SubjectSpec,
    request,
)
from bench.subjects import LMCACHE_PYTHON
from kvpipe.exceptions import ConfigError
from kvpipe.store import LocalStore

# Of the harness, which no user waits for.
pytestmark = pytest.mark.slow

GIB = 1 << 30
PROGRAM = [sys.executable, str(Path(__file__).parent / "stand_in_completions.py")]


def reuses(*times_ms: tuple[float, float], num_loaded: int = 0) -> list[Reuse]:
    return [Reuse(Ask(first, 1.0, 0), Ask(again, 0.5, num_loaded)) for first, again in times_ms]


def test_ratios_are_those_of_the_rounds_to_the_instance_without_a_store() -> None:
    found = {
        NO_STORE: reuses((100, 100), (200, 200), (400, 400)),
        "kvpipe, own store": reuses((110, 10), (200, 30), (400, 80), num_loaded=64),
    }
    rows = {(row["kind"], row["subject"]): row for row in command.rows_of(found, GIB // 2)}
    assert rows["first ask", NO_STORE]["ratio"] == rows["second ask", NO_STORE]["ratio"] == 1
    assert rows["first ask", "kvpipe, own store"]["ratio"] == 1
    again = rows["second ask", "kvpipe, own store"]
    assert (again["ratio"], again["value"].median, again["transport"]) == (0.15, 30, "64 tokens loaded")
    assert again["cpu_s_per_gib"].median == 1.0
    assert "256 tokens" not in "".join(transports.tables(Findings({}, list(rows.values()))))


def arguments(tmp_path: Path, *more: str) -> argparse.Namespace:
    return bench.parse(["store", "--vllm", "--rounds", "5", "--tokens", "512", "--work", str(tmp_path), *more])


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "VLLM_COMMAND", PROGRAM)
    monkeypatch.setattr(run, "_QUIET_S", 0.0)


@pytest.mark.ucx
@pytest.mark.usefixtures("stand_ins")
def test_a_run_measures_each_prompt_twice_and_writes_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    # The stand-in puts nothing into the store.
    monkeypatch.setattr(StoreContents, "until_stored", lambda *_: None)
    file = tmp_path / "f.json"
    args = ["--rounds", "5", "--tokens", "512", "--work", str(tmp_path), "--only", "own store", "--json", str(file)]
    assert bench.main(["store", "--vllm", *args]) == 0
    shown = capsys.readouterr()
    assert "round 5 of 5: kvpipe, own store" in shown.err
    rows = json.loads(file.read_text())["rows"]
    assert [(row["kind"], row["subject"], row["unit"]) for row in rows] == [
        (kind, subject, "ms") for kind in ("first ask", "second ask") for subject in (NO_STORE, "kvpipe, own store")
    ]
    assert [row["transport"] for row in rows] == ["", "", "0 tokens loaded", "512 tokens loaded"]
    assert {row["value"]["num_samples"] for row in rows} == {5}
    for words in ("first ask", "second ask", "512 tokens loaded"):
        assert words in shown.out


class StandInContents:
    """Contents of the store of a stand-in, which has a prompt as soon as it was asked."""

    def clear(self) -> None:
        """Does nothing."""

    def until_stored(self, num_chunks: int) -> None:
        """Does nothing."""


class EndsInSecondRound(StandInContents):
    """Ends its instance when it is cleared for the third time; each round does so twice."""

    instance: Server
    num_clears = 0

    def clear(self) -> None:
        self.num_clears += 1
        if self.num_clears == 3:
            self.instance.end()


def start(stack: ExitStack, tmp_path: Path, name: str, contents: Contents, *, has_store: bool = True) -> Subject:
    pool, setting = stack.enter_context(ServerPool()), Setting(tmp_path, 1024, 1, None)
    transfer = {"kv_connector": "", "kv_role": ""} if has_store else None
    instance = vllm.start_instance(pool, tmp_path, name, setting.args, transfer=transfer)
    instance.until_healthy()
    return Subject(name, instance, contents, stack)


@pytest.mark.usefixtures("stand_ins")
def test_kv_of_an_instance_without_a_store_that_comes_from_elsewhere_is_an_error(tmp_path: Path) -> None:
    with ExitStack() as stack:
        subject = start(stack, tmp_path, NO_STORE, NoContents())
        with pytest.raises(SubjectError, match="came from elsewhere"):
            Rounds([subject], 512, lambda _: None, {}).measure(1)


@pytest.mark.usefixtures("stand_ins")
def test_kv_that_does_not_come_from_the_store_is_an_error(tmp_path: Path) -> None:
    with ExitStack() as stack:
        subject = start(stack, tmp_path, "kvpipe, own store", StandInContents(), has_store=False)
        with pytest.raises(SubjectError, match="kvpipe, own store: no KV came from the store"):
            Rounds([subject], 512, lambda _: None, {}).measure(1)


@pytest.mark.usefixtures("stand_ins")
def test_each_prompt_comes_after_a_short_one_and_the_prefix_cache_is_reset_until_vllm_does_it(tmp_path: Path) -> None:
    reports: list[str] = []
    with ExitStack() as stack:
        subjects = [
            start(stack, tmp_path, NO_STORE, NoContents(), has_store=False),
            start(stack, tmp_path, "kvpipe, own store", StandInContents()),
        ]
        rounds = Rounds(subjects, 1024, reports.append, {})
        rounds.measure(2)
        logs = [json.loads(request(subject.instance.url, "GET", "/log")) for subject in subjects]
    for log in logs:
        assert [len(word) if kind == "prompt" else word for kind, word in log] == 3 * [
            *(512, False, True),
            *(1024, False, True),
            1024,
        ]
        prompts = [tuple(prompt) for kind, prompt in log if kind == "prompt"]
        assert prompts[1::3] == prompts[2::3]
        assert len(set(prompts)) == 6
    assert [line.rpartition(":")[0] for line in reports] == [
        f"round {number} of 2: {name}"
        for number, names in enumerate(
            [(NO_STORE, "kvpipe, own store"), ("kvpipe, own store", NO_STORE), (NO_STORE, "kvpipe, own store")]
        )
        for name in names
    ]
    assert [reuse.again.num_loaded for reuse in rounds.found[NO_STORE]] == [0, 0]
    assert [reuse.again.num_loaded for reuse in rounds.found["kvpipe, own store"]] == [1024, 1024]
    assert all(ask.cpu_s > 0 for reuses in rounds.found.values() for one in reuses for ask in (one.first, one.again))


@pytest.mark.usefixtures("stand_ins")
def test_a_prefix_cache_that_is_not_reset_in_time_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.reuse.subjects._WITHIN_S", 0.0)
    monkeypatch.setattr("bench.reuse.subjects._LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(Subject, "_forgets", lambda _: False)
    with ExitStack() as stack, pytest.raises(SubjectError, match="x: vLLM holds blocks"):
        start(stack, tmp_path, "x", NoContents()).forget()


@pytest.mark.ucx
@pytest.mark.usefixtures("stand_ins")
def test_another_subject_that_fails_is_ended_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(StoreContents, "until_stored", lambda *_: None)

    def start_lmcache(stack: ExitStack, _: Setting) -> Subject:
        stack.callback(run_report, "its servers have ended")
        contents = EndsInSecondRound()
        subject = start(stack, tmp_path, "LMCache, own server", contents)
        contents.instance = subject.instance
        return subject

    monkeypatch.setitem(command.SUBJECTS, "LMCache, own server", SubjectSpec(start_lmcache))
    found = command.measure(arguments(tmp_path, "--only", "own"))
    assert list(found.skipped) == ["LMCache, own server"]
    assert "does not answer: ConnectionRefusedError" in found.skipped["LMCache, own server"]
    assert {row["subject"]: row["value"].num_samples for row in found.rows} == {NO_STORE: 5, "kvpipe, own store": 5}
    shown = capsys.readouterr().err
    assert shown.index("its servers have ended") < shown.index("round 2 of 5")


def test_chunks_that_are_not_stored_in_time_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.reuse.subjects._WITHIN_S", 0.1)
    with LocalStore() as store:
        assert store.put(b"a", b"1")
        contents = StoreContents(store)
        contents.until_stored(1)
        with pytest.raises(SubjectError, match="1 of 2 chunks"):
            contents.until_stored(2)
        contents.clear()
        assert list(store.list()) == []


@pytest.mark.parametrize("more", [("--tokens", "256"), ("--tokens", "100000"), ("--only", "none such")])
def test_arguments_without_meaning_are_refused(tmp_path: Path, more: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=f"{more[0]} {more[1]}"):
        command.measure(arguments(tmp_path, *more))


@pytest.mark.parametrize(
    "more",
    [
        ("--against", sys.executable),
        ("--baseline", "memcpy"),
        ("--data-path", "tcp"),
        ("--pin",),
        ("--working-set", "64M"),
        ("--sizes", "1M"),
    ],
)
def test_options_of_other_stores_are_refused(tmp_path: Path, more: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{more[0]} with --vllm"):
        bench.main(["store", "--vllm", "--work", str(tmp_path), "--only", "none such", *more])


@pytest.mark.parametrize("more", [("--tokens", "512"), ("--lmcache", sys.executable), ("--work", "folder")])
def test_options_of_vllm_are_refused_without_it(more: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=f"{more[0]} without --vllm"):
        bench.main(["store", "--only", "none such", *more])


def test_memory_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_bytes", lambda: 1 << 30)
    with pytest.raises(ConfigError, match="for 2 instances"):
        command.measure(arguments(tmp_path, "--only", "own"))


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter of an environment with LMCache, which logs before it answers."""
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'INFO: a log'; echo 'lmcache=1.2 vllm=3.4'\n")
    program.chmod(0o755)
    return program


LMCACHE = ("LMCache, own server", "LMCache, Redis")


def test_what_is_not_installed_is_left_out_with_the_reason_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    names, skipped = command._names(None, Setting(tmp_path, 512, 1, None))
    assert names == [NO_STORE, "no store, another process", "kvpipe, own store"]
    assert skipped["kvpipe, Redis"] == "redis-server is not installed; scripts/servers fetches it"
    assert all("--lmcache PYTHON" in skipped[name] for name in LMCACHE)
    names, skipped = command._names("lmcache", Setting(tmp_path, 512, 1, python))
    assert names == [NO_STORE, "LMCache, own server"]
    assert list(skipped) == ["LMCache, Redis"]
    with pytest.raises(ConfigError, match="--only redis: redis-server is not installed"):
        command._names("redis", Setting(tmp_path, 512, 1, None))


def test_an_environment_of_lmcache_is_asked_for_its_versions(tmp_path: Path, python: Path) -> None:
    assert command.lmcache.versions(python) == "lmcache=1.2 vllm=3.4"
    nowhere = Setting(tmp_path, 512, 1, Path("/nope/python"))
    assert command._names("own", nowhere)[1] == {
        "LMCache, own server": "cannot start /nope/python: No such file or directory"
    }
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no lmcache' >&2; exit 1\n")
    broken.chmod(0o755)
    found = command._names("own", Setting(tmp_path, 512, 1, broken))[1]
    assert found == {"LMCache, own server": "ModuleNotFoundError: no lmcache"}


def test_the_environment_of_lmcache_is_that_of_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LMCACHE_PYTHON, raising=False)
    assert arguments(tmp_path).lmcache is None
    monkeypatch.setenv(LMCACHE_PYTHON, "/env/bin/python")
    assert arguments(tmp_path).lmcache == Path("/env/bin/python")
