"""The load generator of `kvpipe bench serving`, and its run under faults, with a stand-in for vLLM."""

import asyncio
import io
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from bench.instances import vllm
from bench.instances.servers import Server, ServerPool
from bench.processes import SubjectError
from bench.progress import Progress
from bench.serving import generator
from bench.serving.faults import FaultyRun
from bench.serving.generator import NixlPull, Outcome, RoundRobin
from bench.serving.subjects import Group, Subject
from bench.serving.workload import Mix, Workload

from .stand_in_completions import StandIn, listening
from .test_bench_serving import SMALL

# Of the harness, which no user waits for.
pytestmark = pytest.mark.slow


def ignore(_: Outcome) -> None:
    """Nobody wants to know."""


# --- the generator


def within(scene: Callable[[StandIn], Awaitable[Any]], **instance: Any) -> Any:
    """Runs a scene with an instance."""

    async def main() -> Any:
        async with listening(StandIn(**instance)) as stand_in:
            return await scene(stand_in)

    return asyncio.run(main())


def offered(workload: Workload, *, limit_s: float = 60.0, **instance: Any) -> list[Outcome]:
    """Offers a workload to an instance."""
    return within(
        lambda stand_in: generator.offer(RoundRobin([stand_in.url]), workload, "test", limit_s, ignore), **instance
    )


def test_a_request_asks_for_exactly_its_tokens_and_is_answered() -> None:
    async def scene(stand_in: StandIn) -> list[dict[str, Any]]:
        outcomes = await generator.offer(RoundRobin([stand_in.url]), workload, "test", 60.0, ignore)
        assert [it.error for it in outcomes] == ["", ""]
        assert [(len(it.chunks_s), it.num_output) for it in outcomes] == [(3, 3), (3, 3)]
        return stand_in.bodies

    workload = Workload.draw(1, 100.0, 2, SMALL)
    bodies = sorted(within(scene), key=lambda body: len(body["prompt"]))
    wanted = sorted((workload.prompt(request, "test") for request in workload.requests), key=len)
    assert [body["prompt"] for body in bodies] == wanted
    for body in bodies:
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"]) == (3, True, 0)
        assert "min_tokens" not in body, "decode would not continue after prefill's token"


def test_a_slow_server_shows_in_the_ttft_of_all_requests_that_wait_for_it() -> None:
    """A closed loop would send the later requests later, and find each of them quick (coordinated omission)."""
    workload = Workload.draw(1, 100.0, 10, SMALL)
    outcomes = offered(workload, num_at_once=1, first_s=0.2)
    ttfts = [it.ttft_s for it in outcomes]
    # The last of ten requests within 0.1 s waits for nine turns of 0.2 s.
    assert max(ttfts) > 9 * 0.2 - workload.window_s
    assert sum(ttft > 0.4 for ttft in ttfts) >= 7
    # None was sent only after another had been answered.
    assert max(it.sent_s for it in outcomes) < min(it.end_s for it in outcomes) + 0.2 * 8


def test_tokens_are_noted_when_they_come() -> None:
    (found,) = offered(Workload.draw(1, 10.0, 1, SMALL), first_s=0.1, gap_s=0.05)
    assert found.ttft_s >= 0.1
    assert found.chunks_s[-1] >= 0.1 + 2 * 0.05
    assert len(found.gaps_s) == 2
    assert found.tpot_s == pytest.approx(sum(found.gaps_s) / 2)


def test_what_fails_is_told_with_its_reason() -> None:
    workload = Workload.draw(1, 20.0, 4, SMALL)
    found = offered(workload, fails={0: 503}, num_before_cut={1: 2}, error_after={2: 1})
    assert found[0].error == "503: out of order"
    assert not found[0].chunks_s
    assert found[1].error
    assert len(found[1].chunks_s) == 2
    assert "the engine is dead" in found[2].error
    assert found[3].error == ""


def test_a_request_is_given_up_after_its_limit() -> None:
    (found,) = offered(Workload.draw(1, 10.0, 1, SMALL), limit_s=0.2, first_s=60.0)
    assert "Timeout" in found.error


def test_a_server_that_is_not_there_loses_requests_and_stops_nothing() -> None:
    workload = Workload.draw(1, 100.0, 3, SMALL)
    found = asyncio.run(generator.offer(RoundRobin(["http://127.0.0.1:9"]), workload, "test", 5.0, ignore))
    assert all(it.error and not it.chunks_s for it in found)


def test_an_answer_with_fewer_tokens_than_asked_for_is_a_failure() -> None:
    stream = generator._Stream(0.0)
    for line in (b'data: {"choices": [{"text": "a"}]}', b'data: {"choices": [], "usage": {"completion_tokens": 1}}'):
        stream.read(line)
    assert stream.failure(2) == "the stream ended early"
    stream.read(b"data: [DONE]")
    assert stream.failure(2) == "1 tokens instead of 2"
    assert stream.failure(1) == ""


def test_requests_go_to_instances_in_turn() -> None:
    async def scene(first: StandIn) -> tuple[list[int], list[int]]:
        async with listening(StandIn()) as second:
            await generator.offer(RoundRobin([first.url, second.url]), workload, "test", 60.0, ignore)
            return tuple([len(body["prompt"]) for body in it.bodies] for it in (first, second))

    workload = Workload.draw(1, 200.0, 6, Mix((1, 999), (1, 1)))
    lengths = [request.num_prompt for request in workload.requests]
    first, second = within(scene)
    assert sorted(first) == sorted(lengths[::2])
    assert sorted(second) == sorted(lengths[1::2])


def test_nixl_is_asked_as_its_toy_proxy_does() -> None:
    async def scene(prefill: StandIn) -> tuple[Any, ...]:
        async with listening(StandIn()) as decode:
            found = await generator.ask(NixlPull(prefill.url, decode.url), [5, 6], 3, 60.0)
            return found, prefill.bodies[0], decode.bodies[0]

    found, first, second = within(scene)
    assert (found.error, len(found.chunks_s)) == ("", 3)
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert "min_tokens" not in first
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert second["kv_transfer_params"] == {"remote_block_ids": [0]}
    assert second["max_tokens"] == 3


def test_a_prefill_of_nixl_that_fails_loses_its_request() -> None:
    found = within(lambda it: generator.ask(NixlPull(it.url, it.url), [5], 3, 60.0), fails={0: 500})
    assert "prefill answered 500" in found.error


# --- under faults


def test_leased_blocks_are_read_from_the_metrics_and_a_dead_instance_has_none() -> None:
    async def scene(stand_in: StandIn) -> tuple[float | None, ...]:
        from bench.serving.faults import leased_blocks  # noqa: PLC0415

        async with generator._session(5.0) as http:
            return await leased_blocks(http, stand_in.url), await leased_blocks(http, "http://127.0.0.1:9")

    assert within(scene, leased=7.0) == (7.0, None)


@pytest.mark.slow
def test_instances_are_killed_in_turn_and_come_back_while_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.serving.faults._SAMPLE_EVERY_S", 0.1)
    program = [sys.executable, str(Path(__file__).parent / "stand_in_completions.py")]
    with ServerPool() as pool:
        servers = [
            pool.start(
                name,
                f"http://127.0.0.1:{port}",
                [*program, "--host", "127.0.0.1", "--port", str(port)],
                {},
                tmp_path / name,
            )
            for name, port in zip(("prefill 0", "decode 0", "proxy"), vllm.free_ports(3), strict=True)
        ]
        for server in servers:
            server.until_healthy()
        target = RoundRobin([servers[2].url])
        instances = {"prefill": servers[:1], "decode": servers[1:2]}
        group = Group([Subject("kvpipe", target, target)], instances, {"kvpipe": servers[2]})
        before = [server.group for server in servers]
        workload = Workload.draw(1, 1.0, 10, SMALL)
        cells, faults = FaultyRun(group, 0.5, 30.0, Progress(io.StringIO())).measure(workload)
        assert [cell.phase for cell in cells] == ["load", "faults"]
        assert [it.error for cell in cells for it in cell.outcomes] == [""] * 20
        assert [it.request for it in cells[0].outcomes] == [it.request for it in cells[1].outcomes]
        killed = [fault.instance for fault in faults.faults]
        assert killed[:3] == ["prefill 0", "decode 0", "prefill 0"]
        assert all(fault.back_s > fault.killed_s for fault in faults.faults[:-1])
        assert [server.group != pid for server, pid in zip(servers, before, strict=True)] == [True, True, False]
        assert faults.leased["prefill 0"]


def test_a_server_that_was_ended_starts_again_at_the_same_address(tmp_path: Path) -> None:
    (port,) = vllm.free_ports(1)
    program = [sys.executable, str(Path(__file__).parent / "stand_in_completions.py"), "--host", "127.0.0.1"]
    with ServerPool() as pool:
        server: Server = pool.start(
            "it", f"http://127.0.0.1:{port}", [*program, "--port", str(port)], {}, tmp_path / "log"
        )
        server.until_healthy()
        server.end()
        with pytest.raises(SubjectError, match="it has ended"):
            server.require_running()
        server.start()
        server.until_healthy()
        assert server.cpu_s_by_part()["API servers"] > 0
        assert server.is_healthy()
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 60
    assert not server.is_healthy()
