"""The HTTP surface: routes, and errors in OpenAI's form."""

import asyncio
import logging
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import web
from aiohttp.typedefs import Handler
from multidict import CIMultiDict

from kvpipe.proxy.bodies import CHAT_PATH, BodyError, error_body, parse_body
from kvpipe.proxy.config import ProxyConfig
from kvpipe.proxy.control import Control
from kvpipe.proxy.dispatch import Call, Dispatcher
from kvpipe.proxy.headers import request_headers
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.pairs import Pairs
from kvpipe.proxy.relay import relay
from kvpipe.proxy.upstream import InstanceError, Role, Upstream, open_session

logger = logging.getLogger(__name__)


def create_app(config: ProxyConfig, control: Control) -> web.Application:
    """The proxy as an aiohttp application.

    Run it with `handler_cancellation=True`: when a client leaves, the cancelled handler aborts the instances' requests.
    The caller owns `control` and closes it after the application's cleanup.
    """
    app = web.Application(client_max_size=config.max_body_bytes, middlewares=[_openai_errors])
    proxy = _Proxy(config, control)
    app.cleanup_ctx.append(proxy.lifespan)
    app.router.add_post("/v1/completions", proxy.generate)
    app.router.add_post(CHAT_PATH, proxy.generate)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_get("/health", proxy.health)
    app.router.add_get("/metrics", proxy.metrics)
    app.router.add_get("/status/{handoff:[0-9a-f]{32}}", proxy.status)
    return app


class _Proxy:
    """Request handlers and their shared state."""

    _upstream: Upstream
    _dispatcher: Dispatcher
    _pairs: Pairs

    def __init__(self, config: ProxyConfig, control: Control) -> None:
        self._config = config
        self._control = control
        self._metrics = Metrics()

    async def lifespan(self, _: web.Application) -> AsyncIterator[None]:
        async with open_session(self._config) as session:
            self._upstream = Upstream(session, self._config.silence_timeout_s)
            dispatcher = Dispatcher(self._config, self._upstream, self._control, self._metrics)
            async with Pairs(self._config, self._control) as self._pairs, dispatcher as self._dispatcher:
                yield

    async def generate(self, request: web.Request) -> web.StreamResponse:
        with self._metrics.request() as outcome:
            read = await self._read(request)
            call = Call(request.path, parse_body(read), len(read), request_headers(request.headers))
            async with self._dispatcher.answer(call) as answer:
                response = await relay(request, answer, self._config.client_timeout_s)
                outcome.is_of(answer)
            return response

    async def models(self, request: web.Request) -> web.StreamResponse:
        headers = request_headers(request.headers)
        answer = await self._dispatcher.ask_decode(request.path, headers)
        return await relay(request, answer, self._config.client_timeout_s)

    async def health(self, _: web.Request) -> web.Response:
        prefill, decode = await _probe_instances(self._config, self._upstream)
        is_up, report = self._pairs.report(prefill, decode)
        return _json(HTTPStatus.OK if is_up else HTTPStatus.SERVICE_UNAVAILABLE, report)

    async def metrics(self, _: web.Request) -> web.Response:
        return self._metrics.response()

    async def status(self, request: web.Request) -> web.Response:
        handoff = request.match_info["handoff"]
        result, failures = await self._dispatcher.results.ask(handoff)
        if result is not None:
            return _json(HTTPStatus.OK, result | self._dispatch_of(handoff))
        if failures:
            reasons = "; ".join(f"{address}: {reason}" for address, reason in failures.items())
            return _error(HTTPStatus.BAD_GATEWAY, f"result of {handoff}: {reasons}")
        return _error(HTTPStatus.NOT_FOUND, f"no instance knows handoff {handoff}")

    def _dispatch_of(self, handoff: str) -> dict[str, Any]:
        timing = self._dispatcher.recent.timing(handoff)
        return {} if timing is None else {"dispatch": timing.report()}

    async def _read(self, request: web.Request) -> bytes:
        try:
            async with asyncio.timeout(self._config.client_timeout_s):
                return await request.read()
        except TimeoutError:
            raise web.HTTPRequestTimeout from None


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (BodyError, web.RequestPayloadError) as error:
        return _error(HTTPStatus.BAD_REQUEST, str(error))
    except InstanceError as error:
        return _error(HTTPStatus.BAD_GATEWAY, str(error))
    except web.HTTPClientError as error:
        response = _error(HTTPStatus(error.status), f"{request.method} {request.path}: {error.text}")
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


def _json(status: HTTPStatus, value: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")


def _error(status: HTTPStatus, message: str) -> web.Response:
    kind = status.phrase.title().replace(" ", "") + "Error"  # BadRequestError, NotFoundError, …
    return web.Response(status=status, body=error_body(status, message, kind), content_type="application/json")


async def _probe_instances(config: ProxyConfig, upstream: Upstream) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the state of each P and of each D, within `connect_timeout_s`."""
    return await asyncio.gather(
        _probe_all(config, upstream, "prefill", config.prefill),
        _probe_all(config, upstream, "decode", config.decode),
    )


async def _probe_all(
    config: ProxyConfig, upstream: Upstream, role: Role, instances: tuple[Instance, ...]
) -> dict[str, str]:
    probes = (_probe(config.connect_timeout_s, upstream, role, i) for i in instances)
    states = await asyncio.gather(*probes)
    return {instance.url: state for instance, state in zip(instances, states, strict=True)}


async def _probe(timeout_s: float, upstream: Upstream, role: Role, instance: Instance) -> str:
    try:
        async with asyncio.timeout(timeout_s):
            answer = await upstream.get(role, instance, "/health", CIMultiDict())
    except InstanceError as error:
        return error.reason
    except TimeoutError:
        return "no answer in time"
    return "ok" if answer.status == HTTPStatus.OK else f"answered {answer.status}"
