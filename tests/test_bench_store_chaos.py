"""`kvpipe bench store --chaos`: that it sees broken promises, and that stores keep them; never how fast they are."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

from bench import command
from bench.store import servers
from bench.store.chaos import programs
from bench.store.results import MARGIN_S, Ledger, Survival
from bench.store.values import SIZES, content_of
from kvpipe import ConfigError

# Of the harness, which no user waits for.
pytestmark = pytest.mark.slow

CALL = {"call": "take", "began": "5", "took": "1000000", "late": "-1", "error": ""}


def ledger_of(*reports: dict[str, str], may_lose: bool = False) -> Ledger:
    """A ledger with the reports of one client."""
    ledger = Ledger(may_lose=may_lose)
    for report in reports:
        ledger.note("c", report)
    ledger.end()
    return ledger


def broken(ledger: Ledger) -> dict[str, int]:
    return {name: number for name in Survival.VIOLATIONS if (number := getattr(ledger.found, name))}


def test_other_bytes_than_those_of_the_name_are_another_content() -> None:
    contents = {content_of(key, record) for key in (b"a", b"b") for record in (b"%d" % number for number in range(50))}
    assert {len(content) for content in contents} == set(SIZES)
    assert len(contents) > 50
    assert content_of(b"a", b"1") == content_of(b"a", b"1")


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([CALL], {}),
        ([CALL | {"error": "PeerLostError"}], {}),
        ([CALL | {"late": str(int(MARGIN_S * 1e9))}], {}),
        ([CALL | {"late": str(int(MARGIN_S * 1e9) + 1)}], {"late": 1}),
        ([CALL | {"error": "CorruptDataError"}], {"corrupt": 1}),
        ([CALL | {"error": "ProtocolError"}], {"failed": 1}),
        ([{"bug": "TypeError", "where": "run"}], {"failed": 1}),
        ([{"wrong": "00", "key": "k"}], {"wrong": 1}),
    ],
)
def test_each_report_counts_as_what_it_breaks(reports: list[dict[str, str]], expected: dict[str, int]) -> None:
    ledger = ledger_of(*reports)
    assert broken(ledger) == expected
    assert ledger.found.is_clean == (not expected)
    assert bool(ledger.found.failures) == bool(expected)


def seen(record: str, at: int) -> dict[str, str]:
    return {"seen": record, "at": str(at)}


def acknowledged(record: str, at: int) -> dict[str, str]:
    return {"acknowledged": record, "at": str(at)}


@pytest.mark.parametrize(
    ("reports", "num_twice"),
    [
        ([seen("a", 1), acknowledged("a", 5)], 0),
        # It began before the value was acknowledged.
        ([acknowledged("a", 5), seen("a", 4)], 0),
        ([acknowledged("a", 5), seen("b", 6)], 0),
        ([acknowledged("a", 5), seen("a", 6)], 1),
        ([seen("a", 6), seen("a", 1), acknowledged("a", 5)], 1),
        ([acknowledged("a", 5), acknowledged("a", 7)], 1),
    ],
)
def test_a_value_that_is_found_after_it_was_acknowledged_counts_as_twice(
    reports: list[dict[str, str]], num_twice: int
) -> None:
    assert ledger_of(*reports).found.twice == num_twice


def test_a_damaged_value_breaks_no_promise_of_a_store_that_evicts() -> None:
    assert not broken(ledger_of(CALL | {"error": "CorruptDataError"}, may_lose=True))


@pytest.mark.parametrize("name", ["unanswered", "leases_left", "leaked", "wrong"])
def test_what_is_left_at_the_end_is_no_clean_run(name: str) -> None:
    ledger = ledger_of(CALL)
    assert ledger.found.is_clean
    ledger.found.fail(name, "because")
    assert not ledger.found.is_clean
    assert ledger.found.failures == [f"{name}: because"]


def test_a_store_that_does_not_answer_at_the_end_is_no_clean_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.time, "sleep", lambda _: None)
    monkeypatch.setattr(servers, "_ANSWER_S", 0.1)
    store, found = servers.Store("s", Random(1)), Survival()
    store.url = "kvpipe://127.0.0.1:1"
    store.look(found)
    assert (found.unanswered, found.is_clean) == (1, False)


def test_a_client_has_recovered_with_a_call_that_began_later_and_had_no_error() -> None:
    ledger = ledger_of(CALL | {"began": "9", "error": "PeerLostError"}, CALL | {"began": "5"})
    assert ledger.served_since("c", 4)
    assert not ledger.served_since("c", 5)
    assert not ledger.served_since("other", 4)
    assert (ledger.found.calls, ledger.num_served) == (2, 1)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--chaos", "0"], "--chaos 0: expected at least 1"),
        (["--seed", "1"], "--seed 1: expected --chaos with it"),
        (["--chaos", "1", "--rounds", "9"], "--rounds with --chaos: it has no meaning there"),
        (["--chaos", "1", "--vllm"], "--vllm with --chaos: it has no meaning there"),
        (["--chaos", "1", "--json", "/no/such/file.json"], "there is no such folder"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        command.main(["store", *arguments])


def test_without_a_server_the_command_says_what_fetches_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="neither redis-server nor valkey-server was found: scripts/servers"):
        command.main(["store", "--chaos", "1"])


@pytest.mark.skipif(not programs(), reason="neither redis-server nor valkey-server was found: scripts/servers")
@pytest.mark.skipif(find_spec("redis") is None, reason="redis is not installed")
def test_stores_keep_their_promises_while_servers_and_clients_fail(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "kvpipe", "bench", "store"),
            "--chaos",
            "4000",
            "--seed",
            "23",
            "--json",
            str(figures),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert figures.exists(), done.stderr
    found = {counts["name"]: counts for counts in json.loads(figures.read_text())["rows"]}
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert found.keys() == {"kvpipe", *programs(), "evicting", "cluster"}
    for counts in found.values():
        assert counts["calls"] - counts["errors"] >= 4000 // len(found)
        assert min(counts["values read"], counts["acknowledged"]) > 0
    faults = ("servers killed", "servers frozen", "roles changed", "passwords changed", "connections killed")
    for fault in (*faults, "clients killed in put", "clients killed in lease"):
        assert sum(counts[fault] for counts in found.values()) > 0, fault
