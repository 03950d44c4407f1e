"""The command `kvpipe store`."""

import re
import signal
import subprocess
import sys
import urllib.request

import pytest

from kvpipe import ConfigError, cli
from kvpipe.store import RemoteStore, StoreServer


@pytest.fixture
def server():
    with StoreServer(token="t") as server:
        yield server


def serve(*args, token="t"):
    return subprocess.Popen(
        [sys.executable, "-m", "kvpipe", "store", "serve", "--listen", "127.0.0.1:0", "--token", token, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_served_store_prints_its_address_shows_metrics_and_ends_on_a_signal_in_order(number):
    process = serve("--capacity", "8MiB", "--quota", "1MiB", "--metrics-port", "0")
    try:
        url = process.stdout.readline().strip()
        with RemoteStore.open(url, token="t") as store:
            assert store.put(b"key", b"abc")
            assert store.stats().capacity_bytes == 8 << 20
            with pytest.raises(ConfigError, match="quota of a namespace is 1048576"):
                store.put(b"large", bytes(1 << 20))
            lines = [process.stderr.readline(), process.stderr.readline()]
            metrics = next(found[1] for line in lines if (found := re.search(r"store.metrics url=(\S+)", line)))
            with urllib.request.urlopen(metrics) as answer:
                text = answer.read().decode()
            assert "kvpipe_store_values 1.0" in text
            assert "kvpipe_store_committed_total 1.0" in text
            assert "kvpipe_store_committed_bytes_total 3.0" in text
            for name in ("hits", "hit_bytes", "misses", "waits", "evicted", "expired", "fenced", "lost", "corrupt"):
                assert f"kvpipe_store_{name}_total 0.0" in text
            assert "kvpipe_store_over_quota_total 0.0" in text
            assert "kvpipe_store_clients 1.0" in text
    finally:
        process.send_signal(number)
        rest, log = process.communicate(timeout=30)
    assert (process.returncode, rest) == (0, "")
    assert "store.stopped" in log


def test_an_address_that_others_reach_is_refused_without_a_token(capsys, monkeypatch):
    monkeypatch.delenv("KVPIPE_TOKEN", raising=False)
    assert cli.main(["store", "serve", "--listen", "0.0.0.0:0"]) == 1
    assert "token" in capsys.readouterr().err


def test_a_metrics_port_that_is_taken_is_named(server, capsys):
    port = server.address.rpartition(":")[2]
    assert cli.main(["store", "serve", "--listen", "127.0.0.1:0", "--metrics-port", port]) == 1
    assert f"--metrics-port {port}" in capsys.readouterr().err


def test_a_size_that_is_none_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["store", "serve", "--capacity", "much"])
    assert "expected a size such as 4GiB" in capsys.readouterr().err


def test_values_are_listed_and_purged_but_for_those_that_are_held(server, capsys):
    with RemoteStore.open(server.url, token="t") as store:
        for key in (b"a", b"b", b"c"):
            assert store.put(key, b"xyz")
        with store.take(b"b"), store.select(b"c"):
            assert cli.main(["store", "list", server.url, "--token", "t"]) == 0
            listed = sorted(line.split() for line in capsys.readouterr().out.splitlines())
            assert listed == [["3", "leased", "62"], ["3", "stored", "61"], ["3", "stored", "63"]]
            assert cli.main(["store", "purge", server.url, "--token", "t"]) == 0
            assert capsys.readouterr().out == "deleted: 1 of 3\n"
    assert server.stats().num_values == 2


def test_counters_are_printed(server, capsys):
    assert cli.main(["store", "stats", server.url, "--token", "t"]) == 0
    assert "num_values: 0\n" in (out := capsys.readouterr().out)
    assert "num_clients: 1\n" in out
