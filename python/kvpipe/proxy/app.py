"""The HTTP surface: routes, and errors in OpenAI's form."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware
from aiohttp.web_urldispatcher import _default_expect_handler
from multidict import CIMultiDict

from kvpipe.proxy.api_keys import ApiKeys, instances_authorization
from kvpipe.proxy.bodies import BodyError, OpaqueBody, error_body, parse_body
from kvpipe.proxy.config import ProxyConfig
from kvpipe.proxy.connections import CORS, METRICS
from kvpipe.proxy.control import Control
from kvpipe.proxy.cors import Cors
from kvpipe.proxy.dispatch import Dispatcher
from kvpipe.proxy.endpoints import ABOUT_INSTANCE, ALONE, AUDIO, HANDED_OFF, UNAUTHENTICATED_PATHS
from kvpipe.proxy.exchanges import Call
from kvpipe.proxy.headers import request_headers
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.pairs import Pairs
from kvpipe.proxy.queue_page import queue_page
from kvpipe.proxy.relay import relay
from kvpipe.proxy.request_record import RequestRecord
from kvpipe.proxy.results import RecentHandoff
from kvpipe.proxy.silence import silence_limit
from kvpipe.proxy.upstream import DecodeQueue, InstanceError, Upstream, open_session

# The log has no more of a client's name for a request.
_MAX_REQUEST_ID = 64
# A larger body is parsed in a thread: one with numbers that are none in JSON can take seconds.
_PARSED_AT_ONCE_BYTES = 1 << 20
# The parser's own text may quote the body.
_BROKEN_BODY = "the request's body breaks off, or is not encoded as its headers say"
_NO_KEY = "no valid API key: send one of the proxy's as Authorization: Bearer KEY"


def create_app(config: ProxyConfig, control: Control, queue: DecodeQueue | None = None) -> web.Application:
    """The proxy as an aiohttp application. `queue`, with `amqp` dispatch, is entered and left with it.

    `kvpipe.proxy.connections.Runner` runs it: when a client leaves, the cancelled handler aborts the instances'
    requests.
    The caller owns `control` and closes it after the application's cleanup.

    Raises:
        ConfigError: a file with API keys cannot be read or used; the application's startup raises it for the others.
    """
    app = web.Application()
    app[CORS] = _cors(config)
    app[CORS].install(app)
    app.middlewares.append(_openai_errors)
    app[METRICS] = Metrics()
    expect = None
    if config.api_key_file is not None:
        keys = ApiKeys(config.api_key_file)
        app.middlewares.append(_authenticate(keys, app[METRICS]))
        expect = partial(_continue_with_key, keys)
    proxy = _Proxy(config, control, queue, app[METRICS])
    app.cleanup_ctx.append(proxy.lifespan)
    for path in (*HANDED_OFF, *ALONE, *AUDIO):
        app.router.add_post(path, proxy.answer, expect_handler=expect)
    for path in ABOUT_INSTANCE:
        app.router.add_get(path, proxy.about_instance)
    app.router.add_get("/health", proxy.health)
    app.router.add_get("/metrics", proxy.metrics)
    app.router.add_get("/status/{handoff:[0-9a-f]{32}}", proxy.status)
    if queue is not None:
        app.router.add_get("/queue", partial(_show_queue, queue))
    return app


def _cors(config: ProxyConfig) -> Cors:
    return Cors(
        origins=config.allowed_origins,
        methods=config.allowed_methods,
        headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
    )


class _Proxy:
    """Request handlers and their shared state."""

    _dispatcher: Dispatcher
    _pairs: Pairs

    def __init__(self, config: ProxyConfig, control: Control, queue: DecodeQueue | None, metrics: Metrics) -> None:
        self._config = config
        self._control = control
        self._queue = queue
        self._metrics = metrics

    @property
    def _has_keys(self) -> bool:
        return self._config.api_key_file is not None or self._config.instances_api_key_file is not None

    async def lifespan(self, _: web.Application) -> AsyncIterator[None]:
        config = self._config
        key_file = config.instances_api_key_file
        authorization = None if key_file is None else instances_authorization(key_file)
        session = open_session(config.connect_timeout_s, config.silence_timeout_s, config.instances_ca_file)
        async with session, self._queue or nullcontext():
            has_keys = config.api_key_file is not None
            upstream = Upstream(session, config.silence_timeout_s, authorization, has_client_keys=has_keys)
            dispatcher = Dispatcher(self._config, upstream, self._control, self._metrics, self._queue)
            pairs = Pairs(self._config, self._control)
            async with dispatcher as self._dispatcher, pairs as self._pairs:
                yield

    async def answer(self, request: web.Request) -> web.StreamResponse:
        request_id = request.headers.get("X-Request-Id", "")[:_MAX_REQUEST_ID]
        with _recorded(RequestRecord(request.path, self._metrics, request_id)) as record:
            if self._queue is not None and request.path not in HANDED_OFF:
                text = f"{request.path} is not served behind a broker: ask an instance"
                record.failed(HTTPStatus.NOT_IMPLEMENTED, text)
                return _error(HTTPStatus.NOT_IMPLEMENTED, text)
            read = await self._read(request)
            body = OpaqueBody(read) if request.path in AUDIO else await _parsed(read)
            call = Call(body, len(read), self._headers(request), record)
            async with self._dispatcher.answer(call) as answer:
                return await relay(request, answer, self._config.client_timeout_s, record)

    async def about_instance(self, request: web.Request) -> web.StreamResponse:
        # A request without a key brings nothing of its own along with that of the instances.
        headers = CIMultiDict[str]() if _is_open(request) and self._has_keys else self._headers(request)
        answer = await self._dispatcher.ask_decode(request.path, headers)
        return await relay(request, answer, self._config.client_timeout_s, RequestRecord(request.path, self._metrics))

    async def health(self, _: web.Request) -> web.Response:
        is_up, report = self._pairs.report(*await self._dispatcher.health())
        return _json(HTTPStatus.OK if is_up else HTTPStatus.SERVICE_UNAVAILABLE, report)

    async def metrics(self, _: web.Request) -> web.Response:
        return self._metrics.response()

    async def status(self, request: web.Request) -> web.Response:
        handoff = self._dispatcher.recent.answering(request.match_info["handoff"])
        recent = self._dispatcher.recent.get(handoff)
        if recent is None:
            message = f"this proxy does not remember handoff {handoff}; ask the proxy that answered the request"
            return _error(HTTPStatus.NOT_FOUND, message)
        story = _story(recent)
        result, failures = await self._dispatcher.results.ask(handoff)
        if result is not None:
            return _json(HTTPStatus.OK, result | story)
        if failures:
            reasons = "; ".join(f"{address}: {reason}" for address, reason in failures.items())
            return _error(HTTPStatus.BAD_GATEWAY, f"result of {handoff}: {reasons}")
        return _error(HTTPStatus.NOT_FOUND, f"no instance knows handoff {handoff}")

    def _headers(self, request: web.Request) -> CIMultiDict[str]:
        """The request's headers for an instance. A key of the proxy's own clients is of no use to it."""
        headers = request_headers(request.headers)
        if self._config.api_key_file is not None:
            headers.popall(hdrs.AUTHORIZATION, None)
            headers.popall("x-api-key", None)
        return headers

    async def _read(self, request: web.Request) -> bytes:
        max_bytes = self._config.max_body_bytes
        body = bytearray()
        try:
            async with silence_limit(self._config.client_timeout_s) as moved:
                async for piece in request.content.iter_any():
                    moved()
                    body += piece
                    if len(body) > max_bytes:
                        text = f"the body has more than {max_bytes} bytes (--max-body-bytes)"
                        raise web.HTTPRequestEntityTooLarge(max_bytes, len(body), text=text)
        except TimeoutError:
            text = f"no byte of the body for {self._config.client_timeout_s:g} s (--client-timeout)"
            raise web.HTTPRequestTimeout(text=text) from None
        return bytes(body)


async def _parsed(raw: bytes) -> dict[str, Any]:
    """As `parse_body`, beside the other requests."""
    return parse_body(raw) if len(raw) <= _PARSED_AT_ONCE_BYTES else await asyncio.to_thread(parse_body, raw)


async def _show_queue(queue: DecodeQueue, request: web.Request) -> web.Response:
    """The queues and workers: a page for browsers, else JSON."""
    state = await queue.state()
    if "text/html" in request.headers.get("Accept", ""):
        return web.Response(text=queue_page(state), content_type="text/html")
    return _json(HTTPStatus.OK, state)


@contextmanager
def _recorded(record: RequestRecord) -> Iterator[RequestRecord]:
    """Count and log a request when it has ended."""
    try:
        yield record
    except BodyError as error:
        record.refused(HTTPStatus.BAD_REQUEST, str(error))
        raise
    except web.RequestPayloadError:
        record.refused(HTTPStatus.BAD_REQUEST, _BROKEN_BODY)
        raise
    except web.HTTPClientError as error:
        record.refused(error.status, error.text or error.reason)
        raise
    except InstanceError as error:
        end = record.refused if error.status < HTTPStatus.INTERNAL_SERVER_ERROR else record.failed
        end(error.status, str(error))
        raise
    except ConnectionError:
        raise
    except Exception as error:
        record.failed(HTTPStatus.INTERNAL_SERVER_ERROR, type(error).__name__)
        raise
    finally:
        record.end()


def _story(recent: RecentHandoff) -> dict[str, Any]:
    """The proxy's additions to a handoff's result: its timing, and its attempts where there was more than one."""
    attempts = [attempt.report() for attempt in recent.record.attempts]
    timing = {} if recent.timing is None else {"dispatch": recent.timing.report()}
    return timing | ({"attempts": attempts} if len(attempts) > 1 else {})


def _authenticate(keys: ApiKeys, metrics: Metrics) -> Middleware:
    """Answers 401 to requests without a key, unless their path is open."""

    @web.middleware
    async def check_key(request: web.Request, handler: Handler) -> web.StreamResponse:
        if _is_open(request) or _has_key(request, keys):
            return await handler(request)
        resource = request.match_info.route.resource
        record = RequestRecord("" if resource is None else resource.canonical, metrics)
        record.refused(HTTPStatus.UNAUTHORIZED, _NO_KEY)
        record.end()
        response = _error(HTTPStatus.UNAUTHORIZED, _NO_KEY)
        response.headers[hdrs.WWW_AUTHENTICATE] = "Bearer"
        response.force_close()  # what is left of its body is not read
        return response

    return check_key


async def _continue_with_key(keys: ApiKeys, request: web.Request) -> None:
    """Asks a client that waits for `100 Continue` for its body, unless it will get 401."""
    if _has_key(request, keys):
        await _default_expect_handler(request)


def _is_open(request: web.Request) -> bool:
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical in UNAUTHENTICATED_PATHS


def _has_key(request: web.Request, keys: ApiKeys) -> bool:
    return keys.accepts(request.headers.get(hdrs.AUTHORIZATION, ""))


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BodyError as error:
        return _error(HTTPStatus.BAD_REQUEST, str(error))
    except web.RequestPayloadError:
        response = _error(HTTPStatus.BAD_REQUEST, _BROKEN_BODY)
        response.force_close()  # the parser does not know where the next request begins
        return response
    except InstanceError as error:
        return _error(error.status, str(error))
    except web.HTTPClientError as error:
        response = _error(HTTPStatus(error.status), f"{request.method} {request.path}: {error.text}")
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response


def _json(status: HTTPStatus, value: dict[str, Any]) -> web.Response:
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")


def _error(status: HTTPStatus, message: str) -> web.Response:
    return web.Response(status=status, body=error_body(status, message), content_type="application/json")
