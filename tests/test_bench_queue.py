"""`kvpipe bench queue`: that it measures what it says, and sees what is lost; never how much it measures."""

import asyncio
import json
import os
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, closing
from types import SimpleNamespace

import pytest
from aiohttp import web

from bench import command
from bench.instances import broker_process
from bench.instances.broker_process import BrokerProcess
from bench.instances.servers import ServerPool
from bench.processes import Process, SubjectError
from bench.progress import Progress
from bench.queue import load
from bench.queue.chaos import Chaos, left_in
from bench.queue.instances import PATH, text_of
from bench.queue.load import Ask, Client, Reply
from bench.queue.results import UNITS, Sample, Survival, findings_of
from kvpipe import ConfigError
from kvpipe.control import ControlClient
from kvpipe.transfer_params import consume, produce

# Of the harness, which no user waits for.
pytestmark = pytest.mark.slow

LIMIT_S = 30.0
HANDOFF = "0123456789abcdef" * 2
NEEDS_BROKER = pytest.mark.skipif(bool(broker_process.missing()), reason=broker_process.missing())


def run(scene):
    async def bounded():
        async with asyncio.timeout(LIMIT_S):
            return await scene()

    return asyncio.run(bounded())


def sample(value):
    return Sample(dict.fromkeys(UNITS, value), {"front": value})


def test_the_difference_is_the_median_of_the_differences_of_the_rounds():
    # The machine was slow for both in the second round.
    direct, broker = [sample(each) for each in (1.0, 10.0, 2.0)], [sample(each) for each in (4.0, 12.0, 4.0)]
    found = findings_of({}, direct, broker)
    assert [row["name"] for row in found.rows] == list(UNITS)
    assert {row["difference"].median for row in found.rows} == {2.0}
    assert {(row["direct"].median, row["broker"].median) for row in found.rows} == {(2.0, 4.0)}
    assert found.rows[0]["unit"] == "ms"


# --- stand-ins and their client ---------------------------------------------------------------------------------------


def test_stand_ins_answer_alike_and_keep_kv_until_the_consumer_has_it():
    async def scene():
        command = [sys.executable, "-m", "bench.queue.instances", "1", "1"]
        with closing(Process(command, {})) as instances:
            words = instances.answer()
            (prefill, producer), (decode, _) = (words[role].split(",") for role in ("prefill", "decode"))
            async with load.open_session() as http:

                async def kept():
                    async with http.get(f"{prefill}/counts") as response:
                        return (await response.json())["handoffs"]

                body = {"model": "m", "prompt": [7, 0], "max_tokens": 1, "kv_transfer_params": produce(HANDOFF)}
                async with http.post(prefill + PATH, json=body) as response:
                    answer = await response.json()
                assert answer["choices"][0]["text"] == text_of(7, 1)
                assert answer["kv_transfer_params"]["remote_request_id"] == HANDOFF
                assert await kept() == 1
                body |= {"max_tokens": 3, "kv_transfer_params": consume(HANDOFF, producer)}
                async with http.post(decode + PATH, json=body) as response:
                    assert (await response.json())["choices"][0]["text"] == text_of(7, 3)
                while await kept():  # noqa: ASYNC110 - P tells nobody of the release
                    await asyncio.sleep(0.01)
                reply = await Client(decode, http).ask(Ask(8, 4, is_streamed=True))
        assert (reply.status, reply.error, reply.text) == (200, "", text_of(8, 4))
        assert len(reply.delays_s) == 4
        assert all(delay_s > 0 for delay_s in reply.delays_s)

    run(scene)


def test_a_stand_in_describes_itself_at_its_control_port():
    command = [sys.executable, "-m", "bench.queue.instances", "1", "1"]
    control = ControlClient()
    with closing(control), closing(Process(command, {})) as instances:
        decode = instances.answer()["decode"].split(",")[1]
        assert control.describe(decode).wait(LIMIT_S)["forces_first_tokens"] is True


@asynccontextmanager
async def serving(behaviour):
    """The address of a server of this behaviour."""
    app = web.Application()
    app.router.add_post(PATH, behaviour)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def replies_of(behaviour, *asks):
    """What a client gets from a server of this behaviour."""

    async def scene():
        async with serving(behaviour) as url, load.open_session() as http:
            return [await Client(url, http).ask(ask) for ask in asks]

    return run(scene)


@pytest.mark.parametrize(
    ("events", "error"),
    [
        (b'data: {"choices":[{"text":"1:0 "}]}\n\n', "the stream ended early"),
        (b'data: {"choices":[{"text":"1:0 "}]}\n\ndata: {"error":{"message":"lost"}}\n\n', "lost"),
    ],
)
def test_a_stream_without_its_end_is_an_error(events, error):
    async def behaviour(request):
        return web.Response(body=events, content_type="text/event-stream")

    (reply,) = replies_of(behaviour, Ask(1, 2, is_streamed=True))
    assert error in reply.error
    assert reply.text == "1:0 "


def test_an_answer_that_is_no_200_or_breaks_off_is_an_error():
    async def behaviour(request):
        if (await request.json())["prompt"][0] == 1:
            return web.Response(status=503, text="no broker")
        request.transport.abort()
        return web.Response()

    refused, broken = replies_of(behaviour, Ask(1, 2), Ask(2, 2))
    assert (refused.status, refused.error) == (503, "503: no broker")
    assert "ServerDisconnectedError" in broken.error


@pytest.mark.parametrize("reply", [Reply(200, "1:0 "), Reply(200, "1:0 1:0 1:1 "), Reply(200, "1:0 1:1 ", error="cut")])
def test_a_measurement_fails_on_an_answer_that_is_not_the_right_one(reply):
    load.check(Ask(1, 2), Reply(200, "1:0 1:1 "))
    with pytest.raises(SubjectError, match="request 1"):
        load.check(Ask(1, 2), reply)


# --- requests while processes are killed ------------------------------------------------------------------------------


def chaos(num_requests=100, seed=1):
    return Chaos(None, num_requests, seed, Progress())


@pytest.mark.parametrize(
    ("reply", "outcome"),
    [
        (Reply(200, "5:0 5:1 "), "answered"),
        (Reply(200, "5:0 ", error="the stream ended early"), "lost"),
        (Reply(200, "5:0 "), "lost"),
        (Reply(200, "5:0 5:1 ", error="the stream ended early"), "lost"),
        (Reply(502, error="502: lost"), "lost"),
        (Reply(error="TimeoutError: "), "lost"),
        (Reply(200, "5:0 5:0 5:1 "), "answered_twice"),
        (Reply(200, "5:0 5:1 5:1 ", error="the stream ended early"), "answered_twice"),
    ],
)
def test_each_answer_counts_as_what_its_client_got(reply, outcome):
    run = chaos()
    run._count(Ask(5, 2), reply)
    assert [name for name, number in run.found.lines() if number] == [outcome.replace("_", " ")]
    assert bool(run.found.failures) == (outcome != "answered")


def test_a_request_that_is_too_large_counts_as_such_and_as_lost_with_any_other_answer():
    run_of = chaos()
    for reply in (Reply(413, error="413: no"), Reply(200, "5:0 5:1 "), Reply(502, error="502: lost")):
        run_of._count(Ask(5, 2, request_padding=1), reply)
    assert {name: number for name, number in run_of.found.lines() if number} == {"too large": 1, "lost": 2}


class Cuts:
    """A front end that sends the beginning of an answer and breaks the connection.

    Attributes:
        beginning: text that it sends.
        when_cut: called before it breaks.
    """

    def __init__(self, beginning, when_cut):
        self.beginning = beginning
        self.when_cut = when_cut

    async def post(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self.beginning:
            await response.prepare(request)
            await response.write(b"data: " + json.dumps({"choices": [{"text": self.beginning}]}).encode() + b"\n\n")
            await asyncio.sleep(0.02)  # so that it goes out
        self.when_cut()
        request.transport.abort()
        return response


@pytest.mark.parametrize(
    ("beginning", "lives", "outcome"),
    [
        ("", (0, 1), "front_end_killed"),
        ("5:0 ", (0, 2), "front_end_killed"),
        ("", (1, 1), "front_end_killed"),
        ("5:0 5:0 ", (0, 1), "answered_twice"),
        ("5:0 ", (0, 0), "lost"),
        ("5:0 ", (2, 2), "lost"),
    ],
)
def test_an_answer_that_breaks_off_is_lost_unless_its_front_end_was_killed(beginning, lives, outcome):
    run_of = chaos()
    run_of._lives["front 1"] = lives[0]

    def when_cut():
        run_of._lives["front 1"] = lives[1]

    async def scene():
        async with serving(Cuts(beginning, when_cut).post) as url, load.open_session(keeps_connections=False) as http:
            front = SimpleNamespace(name="front 1", url=url)
            ask = Ask(5, 2, is_streamed=True)
            reply = await run_of._reply_of(front, http, ask)
            assert (reply is None) == (outcome == "front_end_killed")
            if reply is not None:
                run_of._count(ask, reply)

    run(scene)
    assert [name for name, number in run_of.found.lines() if number] == [outcome.replace("_", " ")]


def test_a_front_end_that_accepts_no_connection_has_no_request():
    async def scene():
        run_of = chaos()
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            front = SimpleNamespace(name="front 1", url=f"http://127.0.0.1:{holder.getsockname()[1]}")
            async with load.open_session(keeps_connections=False) as http:
                assert await run_of._reply_of(front, http, Ask(5, 2)) is None
        assert not any(number for _, number in run_of.found.lines())

    run(scene)


def test_a_seed_decides_the_requests():
    asks = [list(chaos(1000, seed=seed)._left) for seed in (1, 1, 2)]
    assert asks[0] == asks[1] != asks[2]
    for differing in ("is_streamed", "request_padding", "answer_padding"):
        assert len({bool(getattr(ask, differing)) for ask in asks[0]}) == 2


@pytest.mark.parametrize("name", ["lost", "answered_twice", "queues_left", "messages_left", "kv_left"])
def test_a_run_is_clean_only_if_nothing_is_lost_repeated_or_left(name):
    assert Survival(answered=9, front_end_killed=2, refused=1, decoded=10).is_clean
    assert not Survival(answered=9, **{name: 1}).is_clean


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with BrokerProcess(tmp_path_factory.mktemp("broker"), "+S 1:1") as broker:
        yield broker


@NEEDS_BROKER
def test_queues_and_messages_that_stay_in_the_broker_are_seen(broker):
    declare = 'rabbit_amqqueue:declare(rabbit_misc:r(<<"/">>, queue, <<"{}">>), true, false, [], none, <<"test">>)'
    broker.call(declare.format("kvpipe.requests"))
    assert left_in(broker) == (0, 0)
    broker.call(declare.format("kvpipe.front.x"))
    assert left_in(broker) == (1, 0)


@NEEDS_BROKER
def test_arguments_for_the_brokers_erlang_machine_reach_it(broker):
    assert broker.call("erlang:system_info(schedulers)") == "1"


@NEEDS_BROKER
def test_a_broker_that_a_pool_has_started_ends_with_it(tmp_path):
    with ServerPool() as pool:
        broker = pool.start_broker(tmp_path)
        pid = broker.pid
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rounds", "4"], "--rounds 4: expected at least 5"),
        (["--requests", "0"], "--requests 0: expected at least 1"),
        (["--workers", "0"], "--workers 0: expected at least 1"),
        (["--chaos", "0"], "--chaos 0: expected at least 1"),
        (["--seed", "1"], "--seed 1: expected --chaos with it"),
        (["--json", "/no/such/file.json"], "there is no such folder"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(arguments, reason):
    with pytest.raises(ConfigError, match=reason):
        command.main(["queue", *arguments])


def test_without_a_broker_the_command_says_what_fetches_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="rabbitmq-server and erl_call not found: run scripts/servers"):
        command.main(["queue"])


def bench(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "kvpipe", "bench", "queue", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@NEEDS_BROKER
@pytest.mark.slow
def test_requests_survive_front_ends_workers_and_a_broker_that_are_killed(tmp_path):
    figures = tmp_path / "figures.json"
    done = bench("--chaos", 1000, "--seed", 23, "--json", figures)
    assert figures.exists(), done.stderr
    [found] = json.loads(figures.read_text())["rows"]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert found["answered"] + found["too large"] == 1000
    assert found["too large"] > 0, "and they failed alone"
    assert all(found[f"{each} kills"] > 0 for each in ("front", "worker", "broker"))
    assert found["front end killed"] > 0
    assert found["decoded"] >= found["answered"]
