"""One hop of a message through RabbitMQ, without kvpipe: what a streamed token pays at least behind a queue.

A process publishes a message every 2.5 ms, as 8 streams with a token every 20 ms do, and another one consumes them.
Measured is the time from before the publish to the delivery. The subjects take turns:

    aio-pika      both processes use aio-pika on uvloop, with confirms, as a worker and a front end do
    no confirms   the same without confirms
    publishing    aio-pika publishes, a blocking socket consumes
    consuming     a blocking socket publishes frames that were encoded before, aio-pika consumes
    sockets       both are blocking sockets: RabbitMQ, the kernel and the wakes of processes are left
    unconfirmed   blocking sockets without confirms
    pinned        as sockets, each process on a CPU of its own
    relay         as unconfirmed, through a process that only passes on bytes: the kernel and wakes are left

RabbitMQ has to be on the PATH. The queue is declared as the one of a front end, unless --queue says otherwise.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import socket
import struct
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import aio_pika
import uvloop
from pamqp import commands, frame, header
from pamqp.body import ContentBody
from yarl import URL

from bench import machine
from bench.instances.broker_process import BrokerProcess
from bench.processes import clock_s
from bench.report import cell, describe, table
from bench.results import summarize
from kvpipe.queue.topology import REPLIES_EXPIRE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

EVERY_S, BODY_BYTES = 0.02 / 8, 300
QUEUE = "hop"
QUEUES: dict[str, dict[str, Any]] = {
    "replies": {"durable": True, "arguments": {"x-expires": REPLIES_EXPIRE_S * 1000, "x-single-active-consumer": True}},
    "plain": {},
    "lazy": {"durable": True, "arguments": {"x-queue-mode": "lazy"}},
    "v2": {"durable": True, "arguments": {"x-queue-version": 2}},
    "quorum": {"durable": True, "arguments": {"x-queue-type": "quorum"}},
}
_BODY, _HEAD = 3, struct.Struct(">BHI")


# --- blocking sockets -----------------------------------------------------------------------------------------------


class Frames:
    """The frames that come on a socket."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received = b""
        self.received_s = 0.0

    def next(self) -> tuple[int, bytes]:
        """Returns the type of the next frame, and all its bytes."""
        while True:
            if len(self._received) >= _HEAD.size:
                kind, _, size = _HEAD.unpack_from(self._received)
                end = _HEAD.size + size + 1
                if len(self._received) >= end:
                    found, self._received = self._received[:end], self._received[end:]
                    return kind, found
            more = self._socket.recv(1 << 16)
            self.received_s = time.monotonic()
            if not more:
                raise EOFError
            self._received += more


def connect(url: str) -> tuple[socket.socket, Frames]:
    """A connection with channel 1."""
    where = URL(url)
    connected = socket.create_connection((where.host, where.port))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    frames = Frames(connected)
    connected.sendall(header.ProtocolHeader().marshal())
    frames.next()
    plain = f"\0{where.user}\0{where.password}"
    call(connected, frames, commands.Connection.StartOk({}, "PLAIN", plain, "en_US"), 0)
    connected.sendall(frame.marshal(commands.Connection.TuneOk(2047, 131072, 0), 0))
    call(connected, frames, commands.Connection.Open("/"), 0)
    call(connected, frames, commands.Channel.Open(), 1)
    return connected, frames


def call(connected: socket.socket, frames: Frames, request: frame.FrameTypes, channel: int) -> None:
    """Sends a frame and waits for the answer."""
    connected.sendall(frame.marshal(request, channel))
    frames.next()


def encoded() -> tuple[bytearray, int]:
    """The frames of a message, and the place of its time in them."""
    properties = commands.Basic.Properties(message_type="replies", reply_to="kvpipe.worker.0", message_id="0" * 32)
    parts = [
        frame.marshal(commands.Basic.Publish(exchange="", routing_key=QUEUE, mandatory=True), 1),
        frame.marshal(header.ContentHeader(0, BODY_BYTES, properties), 1),
        frame.marshal(ContentBody(bytes(BODY_BYTES)), 1),
    ]
    return bytearray(b"".join(parts)), len(parts[0]) + len(parts[1]) + _HEAD.size


def publish_by_socket(url: str, num: int, *, has_confirms: bool) -> None:
    """Publishes messages that say when; waits for the confirm of each."""
    connected, frames = connect(url)
    if has_confirms:
        call(connected, frames, commands.Confirm.Select(), 1)
    send_all(connected, num, frames if has_confirms else None)
    connected.sendall(frame.marshal(commands.Connection.Close(200, "", 0, 0), 0))
    frames.next()


def send_all(connected: socket.socket, num: int, confirms: Frames | None) -> None:
    """Sends messages when they are due."""
    message, place = encoded()
    begun_s = time.monotonic()
    for number in range(num):
        time.sleep(max(0.0, begun_s + number * EVERY_S - time.monotonic()))
        struct.pack_into("d", message, place, time.monotonic())
        connected.sendall(message)
        if confirms is not None:
            confirms.next()


def receive_all(frames: Frames, num: int) -> list[float]:
    """Returns how long each message took, in seconds."""
    took_s = []
    while len(took_s) < num:
        kind, found = frames.next()
        if kind == _BODY:
            took_s.append(frames.received_s - struct.unpack_from("d", found, _HEAD.size)[0])
    return took_s


def consume_by_socket(url: str, num: int, ready: Callable[[], None]) -> list[float]:
    """Consumes messages; returns how long each took."""
    connected, frames = connect(url)
    call(connected, frames, commands.Basic.Consume(queue=QUEUE, no_ack=True), 1)
    ready()
    return receive_all(frames, num)


def consume_from_relay(port: str, num: int, ready: Callable[[], None]) -> list[float]:
    """The same from the relay."""
    connected = socket.create_connection(("127.0.0.1", int(port)))
    ready()
    return receive_all(Frames(connected), num)


def publish_to_relay(port: str, num: int) -> None:
    """Sends messages to the relay."""
    with socket.create_connection(("127.0.0.1", int(port))) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        send_all(connected, num, None)


def relay(listening: socket.socket) -> None:
    """Passes on what the second connection brings to the first one, until it ends."""
    while True:
        consumer, publisher = listening.accept()[0], listening.accept()[0]
        consumer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := publisher.recv(1 << 16):
            consumer.sendall(data)


# --- aio-pika -------------------------------------------------------------------------------------------------------


async def publish_by_aio_pika(url: str, num: int, *, has_confirms: bool) -> None:
    """Publishes messages when they are due, each in a task of its own, as a stream is."""
    async with await aio_pika.connect(url) as connection:
        exchange = (await connection.channel(publisher_confirms=has_confirms)).default_exchange

        async def publish() -> None:
            body = struct.pack("d", time.monotonic()).ljust(BODY_BYTES)
            await exchange.publish(aio_pika.Message(body, type="replies", reply_to="kvpipe.worker.0"), QUEUE)

        begun_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(num):
                await asyncio.sleep(max(0.0, begun_s + number * EVERY_S - time.monotonic()))
                group.create_task(publish())


async def consume_by_aio_pika(url: str, num: int, ready: Callable[[], None]) -> list[float]:
    """Consumes messages; returns how long each took."""
    took_s: list[float] = []
    is_done = asyncio.Event()
    async with await aio_pika.connect(url) as connection:
        queue = await (await connection.channel()).get_queue(QUEUE, ensure=False)

        async def receive(message: aio_pika.abc.AbstractIncomingMessage) -> None:
            took_s.append(time.monotonic() - struct.unpack_from("d", message.body)[0])
            if len(took_s) == num:
                is_done.set()

        await queue.consume(receive, no_ack=True)
        ready()
        await is_done.wait()
    return took_s


def on_uvloop(work: Any) -> Any:
    """Runs a coroutine."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


# --- subjects -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Subject:
    """How messages are published and consumed."""

    publish: Callable[[str, int], None]
    consume: Callable[[str, int, Callable[[], None]], list[float]]
    is_pinned: bool = False
    is_relayed: bool = False


def _confirmed(url: str, num: int) -> None:
    publish_by_socket(url, num, has_confirms=True)


def _unconfirmed(url: str, num: int) -> None:
    publish_by_socket(url, num, has_confirms=False)


def _publish(url: str, num: int) -> None:
    on_uvloop(publish_by_aio_pika(url, num, has_confirms=True))


def _publish_unconfirmed(url: str, num: int) -> None:
    on_uvloop(publish_by_aio_pika(url, num, has_confirms=False))


def _consume(url: str, num: int, ready: Callable[[], None]) -> list[float]:
    return on_uvloop(consume_by_aio_pika(url, num, ready))  # type: ignore[no-any-return]


SUBJECTS = {
    "aio-pika": Subject(_publish, _consume),
    "no confirms": Subject(_publish_unconfirmed, _consume),
    "publishing": Subject(_publish, consume_by_socket),
    "consuming": Subject(_confirmed, _consume),
    "sockets": Subject(_confirmed, consume_by_socket),
    "unconfirmed": Subject(_unconfirmed, consume_by_socket),
    "pinned": Subject(_confirmed, consume_by_socket, is_pinned=True),
    "relay": Subject(publish_to_relay, consume_from_relay, is_relayed=True),
}


def _pin(subject: Subject, place: int) -> None:
    if subject.is_pinned:
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[place % len(cpus)]})


def publisher(name: str, where: str, num: int, results: Connection) -> None:
    """Publishes in a process of its own; sends the seconds of CPU."""
    _pin(SUBJECTS[name], 0)
    begun_s = time.process_time()
    SUBJECTS[name].publish(where, num)
    results.send(time.process_time() - begun_s)


def consumer(name: str, where: str, num: int, results: Connection) -> None:
    """Consumes in a process of its own; sends when it is ready, then how long messages took and the seconds of CPU."""
    _pin(SUBJECTS[name], 1)
    begun_s = 0.0

    def ready() -> None:
        nonlocal begun_s
        begun_s = time.process_time()
        results.send(None)

    took_s = SUBJECTS[name].consume(where, num, ready)
    results.send((took_s, time.process_time() - begun_s))


@contextlib.contextmanager
def process(target: Callable[..., None], *arguments: Any) -> Iterator[Connection]:
    """A process, and the end of a pipe to what it sends."""
    ours, theirs = multiprocessing.Pipe()
    started = multiprocessing.Process(target=target, args=(*arguments, theirs), daemon=True)
    started.start()
    theirs.close()  # so that a process that fails ends the run
    yield ours
    started.join()


def measure(name: str, where: str, num: int, relay_pid: int) -> dict[str, float]:
    """One round of one subject: times, and CPU for a message, in microseconds."""
    with process(consumer, name, where, num) as consumed:
        consumed.recv()
        before_s = clock_s(relay_pid)
        with process(publisher, name, where, num) as published:
            publisher_s = published.recv()
        took_s, consumer_s = consumed.recv()
        relay_s = clock_s(relay_pid) - before_s
    cpu_s = {"CPU publisher": publisher_s, "CPU consumer": consumer_s, "CPU between": relay_s}
    times_s = {"p50": median(took_s), "p90": quantiles(took_s, n=10)[-1]}
    return {key: 1e6 * value for key, value in times_s.items()} | {
        key: 1e6 * value / num for key, value in cpu_s.items()
    }


async def declare(url: str, kind: str) -> None:
    """Declares the queue."""
    async with await aio_pika.connect(url) as connection:
        await (await connection.channel()).declare_queue(QUEUE, **QUEUES[kind])


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=800, help="of a round of a subject")
    parser.add_argument("--only", default=",".join(SUBJECTS), help="subjects, separated by commas")
    parser.add_argument("--queue", choices=QUEUES, default="replies")
    parser.add_argument("--erlang", default="", help="arguments of the broker's Erlang machine, such as '+S 1:1'")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        data = Path(folder) / "broker"
        data.mkdir()
        broker = stack.enter_context(BrokerProcess(data, erlang_arguments=arguments.erlang))
        asyncio.run(declare(broker.url, arguments.queue))
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        passing = multiprocessing.Process(target=relay, args=(listening,), daemon=True)
        passing.start()
        stack.callback(passing.terminate)
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for number in range(arguments.rounds):
            first = number % len(names)
            for name in [*names[first:], *names[:first]]:
                is_relayed = SUBJECTS[name].is_relayed
                where = str(listening.getsockname()[1]) if is_relayed else broker.url
                pid = passing.pid if is_relayed else broker.pid
                samples[name].append(measure(name, where, arguments.messages, pid or 0))
    print(describe({**machine.machine(), "queue": arguments.queue, "erlang": arguments.erlang}))
    columns = list(samples[names[0]][0])
    rows = [[name, *(cell(summarize([it[key] for it in found])) for key in columns)] for name, found in samples.items()]
    print(table(["us", *columns], rows))


if __name__ == "__main__":
    main()
