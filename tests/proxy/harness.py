"""A real proxy on a real socket, with stand-ins where vLLM and the control ports would be.

The instances are stand-ins because the answers tested here (a 500, a connection that breaks off, a
prefill that never ends) cannot be had from a real vLLM on demand. The whole road with real
instances is tested in tests/e2e.
"""

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

import aiohttp
import orjson
import uvloop
from aiohttp import web

from kvpipe.control import Moment
from kvpipe.proxy import Instance, ProxyConfig
from kvpipe.proxy.server import create_runner, listen
from kvpipe.transfer_params import parse

LIMIT_S = 20.0
# A limit for an instance that is silent. On a busy machine the others of its scene answer within it.
SILENCE_S = 1.0
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
REQUEST = {"model": "m", "prompt": "hello", "max_tokens": 8}
EVENTS = [b'data: {"text":"a"}\n\n', b'data: {"text":"b"}\n\n', b"data: [DONE]\n\n"]

# Of the endpoint of each `stage` and of its instances; None: they speak HTTP.
CERTIFICATE = None

Behaviour = Callable[[web.Request], Awaitable[web.StreamResponse]]


def run(scene, limit_s=LIMIT_S):
    """Run one scene to its end; a test that would hang fails instead."""

    async def bounded():
        async with asyncio.timeout(limit_s):
            await scene()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as the proxy runs
        runner.run(bounded())


class RecordingControl:
    """A fake of `kvpipe.control.ControlClient` that keeps everything in memory.

    The real client is tested end to end; here only what the proxy asks of it matters.
    """

    def __init__(self):
        self.released = []
        self.results = {}
        self.asked = []
        self.description = {"forces_first_tokens": True, "reasoning_parser": ""}
        self.max_model_lens = {}  # by address
        self.moment = Moment("due", 0.1)
        self.reasons = {}
        self.checks = []
        self._changed = asyncio.Event()

    async def check(self, address, producer, timeout=5.0):  # noqa: ASYNC109 - the real one has it
        self.checks.append((address, producer))
        self._changed.set()
        reason = self.reasons.get((address, producer), "")
        if isinstance(reason, Exception):
            raise reason
        return reason

    async def until_checked(self, num=1):
        while len(self.checks) < num:
            self._changed.clear()
            await self._changed.wait()
        await asyncio.sleep(0)  # the proxy takes the last answer

    async def release(self, address, handoff, timeout=5.0):  # noqa: ASYNC109 - the real one has it
        self.released.append((address, handoff))
        self._changed.set()
        return True

    async def result(self, address, handoff, timeout=5.0):  # noqa: ASYNC109 - the real one has it
        self.asked.append(address)
        self._changed.set()
        result = self.results.get(address)
        if isinstance(result, Exception):
            raise result
        return result

    async def subscribe(self, address, handoff, lead_s, timeout=300.0):  # noqa: ASYNC109 - the real one has it
        return self.moment

    async def watched(self, address, handoff, timeout=300.0):  # noqa: ASYNC109 - the real one has it
        return Moment("watched")

    async def describe(self, address, timeout=5.0):  # noqa: ASYNC109 - the real one has it
        if isinstance(self.description, Exception):
            raise self.description
        limit = self.max_model_lens.get(address)
        return self.description if limit is None else self.description | {"max_model_len": limit}

    async def until_asked(self, num=1):
        while len(self.asked) < num:
            self._changed.clear()
            await self._changed.wait()

    async def until_released(self, num=1):
        while len(self.released) < num:
            self._changed.clear()
            await self._changed.wait()


@dataclass
class StandIn:
    """Stands in for a vLLM instance: answers as `behaviour` says, remembers what it was asked."""

    name: str
    behaviour: Behaviour
    url: str = ""
    port: str = ""
    certificate: Any = None
    bodies: list = field(default_factory=list)
    headers: list = field(default_factory=list)
    paths: list = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def control(self):
        return self.port or f"{self.name}.control:7100"

    @property
    def handoffs(self):
        return [parse(body["kv_transfer_params"]).handoff.hex() for body in self.bodies]

    async def handle(self, request):
        if request.method == "POST":
            read = getattr(self.behaviour, "read", web.Request.read)
            self.bodies.append(json.loads(await read(request)))  # as vLLM reads them
        self.headers.append(request.headers)
        self.paths.append(request.path)
        self.asked.set()
        try:
            return await self.behaviour(request)
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    async def serve(self):
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self.handle)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, max_field_size=1 << 20)
        await runner.setup()
        context = self.certificate and self.certificate.server_context()
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024, ssl_context=context)
        await site.start()
        self._site = site
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def stop_listening(self):
        """Refuses connections, and keeps those that it has."""
        self._site._server.close()


def answers(status=200, body=b'{"id":"x"}', content_type="application/json"):
    async def behaviour(request):
        return web.Response(status=status, body=body, content_type=content_type)

    return behaviour


def streams(*pieces, then=None):
    async def behaviour(request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if then is not None:
            await then(request)
        return response

    return behaviour


def describes(behaviour, value=1.0, parser=""):
    """A D whose metrics report whether it forces first tokens, as `KVStoreConnector` has them."""
    labels = f'engine="0",model_name="m",reasoning_parser="{parser}"'
    text = f"# HELP more\nvllm:kvpipe_store_forces_first_tokens{{{labels}}} {value}\n"

    async def behave(request):
        return web.Response(text=text) if request.path == "/metrics" else await behaviour(request)

    return behave


async def never_ends(request):
    await asyncio.Event().wait()
    raise AssertionError


async def breaks_off(request):
    """Let what was written go out, then cut the connection."""
    await asyncio.sleep(0.02)
    request.transport.abort()
    await asyncio.sleep(1)
    raise AssertionError


@contextmanager
def dead_port():
    """A port without a listener, which no other process gets meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


DEAD = "dead"


@dataclass
class Stage:
    url: str
    prefill: list
    decode: list
    control: RecordingControl
    client: aiohttp.ClientSession
    trusted: ssl.SSLContext | None

    async def connect(self):
        """A connection of a client that writes its own bytes."""
        return await asyncio.open_connection("127.0.0.1", int(self.url.rpartition(":")[2]), ssl=self.trusted)

    async def post(self, path=COMPLETIONS, body=REQUEST, **options):
        options["headers"] = {"Content-Type": "application/json"} | options.get("headers", {})
        data = BytesIO(orjson.dumps(body))
        async with self.client.post(self.url + path, data=data, **options) as response:
            return response.status, await response.read(), response.headers


@asynccontextmanager
async def stage(
    prefill=None, decode=None, control=None, ports=("", ""), *, has_control=True, **settings
) -> AsyncIterator[Stage]:
    """A proxy before instances with these behaviours; `DEAD` is one without a listener. One with a URL runs.

    `control` is a real client and `ports` are the addresses of all P's and of all D's, where there are real ones.
    """
    control = control or RecordingControl()
    certificate = CERTIFICATE
    async with AsyncExitStack() as stack:
        pools = []
        for role, behaviours, port in (("p", prefill, ports[0]), ("d", decode, ports[1])):
            pools.append(await _pool(stack, role, behaviours or [answers()], port))
        if certificate is not None:
            settings = {**certificate.of_endpoint, "instances_ca_file": certificate.ca, **settings}
        config = ProxyConfig(
            prefill=tuple(Instance(i.url, i.control if has_control else "") for i in pools[0]),
            decode=tuple(Instance(i.url, i.control if has_control else "") for i in pools[1]),
            port=0,
            **{"drain_timeout_s": 0.2, "dispatch": "sequential", **settings},
        )
        runner = create_runner(config, control)
        stack.push_async_callback(runner.cleanup)
        await listen(runner, config)
        url = f"{'https' if config.ssl_certfile else 'http'}://127.0.0.1:{runner.addresses[0][1]}"
        trusted = certificate and certificate.client_context()
        client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, ssl=trusted or True))
        yield Stage(url, *pools, control, await stack.enter_async_context(client), trusted)


async def _pool(stack, role, behaviours, port):
    pool = []
    for index, behaviour in enumerate(behaviours):
        if hasattr(behaviour, "url"):
            pool.append(behaviour)
            continue
        instance = StandIn(f"{role}{index}", behaviour, port=port, certificate=CERTIFICATE)
        if behaviour is DEAD:
            instance.url = f"{'https' if CERTIFICATE else 'http'}://127.0.0.1:{stack.enter_context(dead_port())}"
        else:
            stack.push_async_callback((await instance.serve()).cleanup)
        pool.append(instance)
    return pool
