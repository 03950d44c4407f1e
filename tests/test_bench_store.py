"""`kvpipe bench store`: its other clients of Redis, and what takes part where a server is not installed."""

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bench import command, subjects
from bench.measure import Case
from bench.programs import redis_values, request, side
from bench.progress import Progress
from bench.run import Run
from kvpipe import ConfigError

SIZE, NUM_VALUES = 64, 200


def task(kind: str, count: int) -> request.Task:
    words = {"kind": kind, "bytes": SIZE, "blocks": 1, "layout": "none", "count": count, "round": 1}
    return request.Task.of(request.parse(request.compose("run", words))[1])


@pytest.fixture
def url() -> Iterator[str]:
    for program in ("redis-server", "redis-benchmark"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} was not found: scripts/servers")
    server = redis_values.Server(side.Setup(0, "127.0.0.1", {"server": "redis-server"}))
    with closing(server):
        yield str(server.hello()["url"])


def test_each_get_of_redis_benchmark_finds_a_value(url: str) -> None:
    subject = redis_values.RedisBenchmark(side.Setup(SIZE * NUM_VALUES, "", {}))
    subject.meet({"url": url})
    get = task("get", 2000)
    subject.clear(get)
    assert subject.run(get)["seconds"] > 0
    assert subject._client.info("stats")["keyspace_hits"] == get.count
    assert subject._client.dbsize() == NUM_VALUES
    assert subject._client.strlen(f"key:{0:012}") == SIZE
    subject.run(task("put", 2000))
    assert subject._client.dbsize() == NUM_VALUES
    subject._client.flushdb()
    with pytest.raises(ValueError, match="2000 of 2000 keys had no value"):
        subject.run(get)


def test_subjects_on_a_server_that_is_not_installed_are_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    run = Run(subjects.other_stores(), [Case("put", SIZE), Case("wake", 8)], Progress())
    for name in ("Redis", "Redis, 4 threads", "Redis keeping memory, 4 threads", "redis-py, Redis"):
        assert run.skipped[name] == "redis-server is not installed; scripts/servers fetches it"
    assert run.skipped["Valkey"] == "valkey-server is not installed; scripts/servers fetches it"
    assert {entry.subject.name.partition(",")[0] for entry in run.entries} == {"LMCache on Redis", "LMCache"}
    with pytest.raises(ConfigError, match="--only valkey: valkey-server is not installed"):
        command.main(["store", "--only", "valkey"])


def test_redis_that_keeps_its_memory_is_one_subject() -> None:
    found = [one for one in subjects.other_stores() if "keeping" in one.name]
    assert [(one.name, one.kinds, dict(one.options)) for one in found] == [
        ("Redis keeping memory, 4 threads", subjects.VALUES, {"threads": "4"})
    ]
