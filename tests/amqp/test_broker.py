"""The broker that tests start: that what they have happen to it really does."""

import asyncio
import contextlib
import shutil
import socket
from pathlib import Path
from urllib.parse import urlsplit

import aio_pika
import pytest
from aio_pika.exceptions import ConnectionClosed

from bench.instances import broker_process
from bench.instances.broker_process import BrokerProcess
from bench.processes import SubjectError
from tests.amqp.harness import run
from tests.peers import wait_until

# A publisher that is blocked is not answered for so long.
UNANSWERED_S = 0.3
KEPT = {"x-queue-type": "quorum"}


@contextlib.asynccontextmanager
async def connected(broker, name=""):
    """A channel with confirms and a queue, which ends with the connection if it has no name."""
    async with await aio_pika.connect(broker.url) as connection:
        channel = await connection.channel(publisher_confirms=True)
        if name:
            yield channel, await channel.declare_queue(name, durable=True, arguments=KEPT)
        else:
            yield channel, await channel.declare_queue(exclusive=True)


async def publish(channel, queue, body=b"x"):
    message = aio_pika.Message(body, delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
    await channel.default_exchange.publish(message, queue.name)


def traces_of(folder):
    """Processes that were started with this folder, as children of a broker are."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if str(folder).encode() in environment.read_bytes():
                found.append((environment.parent / "comm").read_text())
    return found


def test_queues_shows_what_is_ready_in_each(broker):
    async def scene():
        async with connected(broker) as (channel, queue):
            assert broker.queues()[queue.name] == 0
            await publish(channel, queue)
            await publish(channel, queue)
            assert broker.queues()[queue.name] == 2
        assert queue.name not in broker.queues()

    run(scene)


@pytest.mark.parametrize("resource", ["memory", "disk"])
def test_a_blocked_publisher_is_told_and_its_message_confirmed_once_there_is_room(broker, resource):
    async def scene():
        async with connected(broker) as (channel, queue):
            await publish(channel, queue)
            with broker.blocked(resource):
                publishing = asyncio.create_task(publish(channel, queue))
                done, _ = await asyncio.wait({publishing}, timeout=UNANSWERED_S)
                assert not done
                while f"{resource} resource limit alarm set" not in broker.log:  # noqa: ASYNC110 - it writes later
                    await asyncio.sleep(0.02)
            await publishing
            assert broker.queues()[queue.name] == 2

    run(scene)


def test_close_connections_closes_those_of_all_clients_with_a_reason(broker):
    async def scene():
        reasons = asyncio.Queue()
        async with await aio_pika.connect(broker.url) as one, await aio_pika.connect(broker.url) as other:
            for connection in (one, other):
                connection.close_callbacks.add(lambda _, error: reasons.put_nowait(error))
            broker.close_connections()
            for _ in (one, other):
                with pytest.raises(ConnectionClosed, match="by the operator"):
                    raise await reasons.get()

    run(scene)


def test_a_call_that_the_node_refuses_raises(broker):
    with pytest.raises(SubjectError, match="undef"):
        broker.call("no:such()")


@pytest.mark.slow
@pytest.mark.parametrize("end", [BrokerProcess.kill, BrokerProcess.stop])
def test_a_message_that_was_confirmed_is_there_in_its_next_life(own_broker, end):
    async def before():
        async with connected(own_broker, "kept") as (channel, queue):
            await publish(channel, queue, b"kept")
            own_broker.save_directory()
            pid = own_broker.pid
            end(own_broker)
            own_broker.start()
            assert own_broker.pid != pid

    async def after():
        async with connected(own_broker, "kept") as (_, queue):
            assert (await queue.get()).body == b"kept"

    run(before)
    run(after)


@pytest.mark.slow
def test_two_brokers_run_side_by_side_and_nothing_of_them_stays(own_broker, tmp_path):
    with BrokerProcess(tmp_path) as other:
        assert other.url != own_broker.url
        assert other.call("node()") != own_broker.call("node()")
        assert any("beam" in name for name in traces_of(tmp_path))
    own_broker.stop()
    assert traces_of(tmp_path) == []


@pytest.mark.slow
def test_a_broker_that_cannot_start_shows_why_and_leaves_nothing(tmp_path):
    if reason := broker_process.missing():
        pytest.skip(reason)
    broker = BrokerProcess(tmp_path)
    address = "127.0.0.1", urlsplit(broker.url).port
    with socket.create_server(address), pytest.raises(SubjectError, match="eaddrinuse"):
        broker.start()
    # A shell that Erlang runs at that moment notices by its own pipes that its parent has ended.
    wait_until(lambda: traces_of(tmp_path) == [])


def test_without_the_server_the_reason_names_scripts_servers(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert broker_process.missing() == "rabbitmq-server and erl_call not found: run scripts/servers"
    with pytest.raises(SubjectError, match="scripts/servers"):
        BrokerProcess(tmp_path).start()


def test_debians_wrapper_is_passed_by(tmp_path, monkeypatch):
    """It drops the environment, which has the whole configuration."""
    for name in ("rabbitmq-script-wrapper", "rabbitmq-server"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "sbin").mkdir()
    (tmp_path / "sbin/rabbitmq-server").symlink_to(tmp_path / "rabbitmq-script-wrapper")
    monkeypatch.setenv("PATH", str(tmp_path / "sbin"))
    assert shutil.which("rabbitmq-server") == str(tmp_path / "sbin/rabbitmq-server")
    assert broker_process._server_script() == str(tmp_path / "rabbitmq-server")
