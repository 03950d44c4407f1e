"""Signals need a process of their own: a proxy with instances and client in this one."""

import asyncio
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from kvpipe.proxy import Instance, ProxyConfig, serve

from .harness import COMPLETIONS, EVENTS, REQUEST, RecordingControl, StandIn, answers, never_ends, run, streams

STREAMED = REQUEST | {"stream": True}

PROXY = """
import asyncio, logging, sys
import uvloop
from kvpipe.proxy import Instance, ProxyConfig, serve
from tests.proxy.harness import RecordingControl

class SlowControl(RecordingControl):
    '''Releases take a while and are printed.'''
    async def release(self, address, handoff, timeout=5.0):
        await asyncio.sleep(0.1)
        print("released", handoff, flush=True)
        return True

logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
config = ProxyConfig(
    prefill=(Instance(sys.argv[1], "p:1"),), decode=(Instance(sys.argv[2]),),
    port=0, drain_timeout_s=float(sys.argv[3]), dispatch="sequential",
)
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
    runner.run(serve(config, SlowControl()))
"""


async def start_proxy(stack, decode, drain_timeout_s):
    urls = []
    for name, behaviour in (("p", answers()), ("d", decode)):
        instance = StandIn(name, behaviour)
        stack.push_async_callback((await instance.serve()).cleanup)
        urls.append(instance.url)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PROXY, *urls, str(drain_timeout_s)),
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    stack.push_async_callback(end, process)
    line = (await process.stdout.readline()).decode()
    assert line.startswith("proxy.listening"), line
    port = line.split("port=")[1].split()[0]
    return process, f"http://127.0.0.1:{port}"


async def end(process):
    """Ends a proxy that a failed test has left behind: the loop would wait for it for ever."""
    if process.returncode is None:
        process.kill()
    await process.wait()


@asynccontextmanager
async def contexts():
    async with AsyncExitStack() as stack, aiohttp.ClientSession() as client:
        yield stack, client


async def begin_stream(client, url):
    response = await client.post(url + COMPLETIONS, json=STREAMED)
    assert await response.content.readany() == EVENTS[0]
    return response


async def until_refused(client, url):
    """The proxy closes its listener a moment after it has logged that it drains."""
    while True:
        try:
            async with client.get(url + "/health", headers={"Connection": "close"}) as response:
                await response.read()
        except aiohttp.ClientConnectorError:
            return
        except aiohttp.ClientError:  # accepted, and then closed
            pass
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_accepting_and_lets_running_requests_finish(number):
    async def scene():
        may_end = asyncio.Event()

        async def ends(request):
            await may_end.wait()

        async with contexts() as (stack, client):
            process, url = await start_proxy(stack, streams(EVENTS[0], then=ends), 10)
            response = await begin_stream(client, url)
            process.send_signal(number)
            assert (await process.stdout.readline()).startswith(b"proxy.draining")
            await until_refused(client, url)
            may_end.set()
            assert await response.read() == b""
            said = (await process.stdout.read()).decode().splitlines()
            assert [line.split()[0] for line in said] == ["request.end", "released", "proxy.stopped"]
            assert await process.wait() == 0

    run(scene)


def test_a_signal_at_the_moment_at_which_it_listens_is_heard(caplog):
    class Stopping(logging.Handler):
        """Ends the proxy that says that it listens."""

        def emit(self, record):
            if record.getMessage().startswith("proxy.listening"):
                os.kill(os.getpid(), signal.SIGTERM)

    def not_heard(*_):
        message = "the proxy does not handle the signal yet"
        raise AssertionError(message)

    logger, handler = logging.getLogger("kvpipe.proxy.server"), Stopping()
    before = signal.signal(signal.SIGTERM, not_heard)
    logger.addHandler(handler)
    caplog.set_level("INFO", logger.name)
    prefill, decode = (Instance("http://127.0.0.1:1", "p:1"),), (Instance("http://127.0.0.1:1"),)
    try:
        run(lambda: serve(ProxyConfig(prefill=prefill, decode=decode, port=0), RecordingControl()))
    finally:
        logger.removeHandler(handler)
        signal.signal(signal.SIGTERM, before)
    assert "proxy.stopped" in caplog.text


def test_after_the_drain_deadline_running_requests_are_cancelled_and_released():
    async def scene():
        async with contexts() as (stack, client):
            process, url = await start_proxy(stack, streams(EVENTS[0], then=never_ends), 0.3)
            response = await begin_stream(client, url)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
            said = (await process.stdout.read()).decode().splitlines()
            assert [line.split()[0] for line in said] == [
                "proxy.draining",
                "request.end",
                "released",
                "proxy.stopped",
            ]
            assert said[2].split()[1] == response.headers["x-kvpipe-handoff"]
            assert await process.wait() == 0

    run(scene)
