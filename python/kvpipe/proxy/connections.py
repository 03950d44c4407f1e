"""Connections of clients. What aiohttp's HTTP parser refuses is counted, and gets an error in OpenAI's form."""

import asyncio
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.helpers import DEFAULT_CHUNK_SIZE
from aiohttp.http import HttpProcessingError, HttpRequestParser
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import MAX_MSG_QUEUE_SIZE

from kvpipe.proxy.bodies import error_body
from kvpipe.proxy.cors import Cors
from kvpipe.proxy.headers import MAX_LINE_BYTES
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.request_record import RequestRecord

METRICS = web.AppKey("metrics", Metrics)
CORS = web.AppKey("cors", Cors)

# As vLLM's `--h11-max-header-count`.
_MAX_HEADERS = 256
# A request that is not complete takes no more memory than this, and one read from its socket.
MAX_HEAD_BYTES = 1 << 20


class Runner(web.AppRunner):
    """Runs the proxy's application, which has its `METRICS` and `CORS`; arguments as those of `web.AppRunner`."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(server, self.app[METRICS], self.app[CORS])


class _Server(web.Server):
    def __init__(self, server: web.Server, metrics: Metrics, cors: Cors) -> None:
        super().__init__(server.request_handler, request_factory=server.request_factory, handler_cancellation=True)
        self._metrics = metrics
        self._cors = cors

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._metrics, self._cors)


class _HeadTooLargeError(BadHttpMessage):
    """The URL and all headers of a request are too large together."""


class _Parser(HttpRequestParser):
    """aiohttp's parser, which limits each header of a request, with a limit on all of them."""

    def __init__(self, protocol: web.RequestHandler, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            protocol,
            loop,
            DEFAULT_CHUNK_SIZE,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=_MAX_HEADERS,
            payload_exception=web.RequestPayloadError,
            max_msg_queue_size=MAX_MSG_QUEUE_SIZE,
        )
        self._num_head_bytes = 0
        self._last_body: StreamReader = EMPTY_PAYLOAD

    def feed_data(self, data: bytes) -> tuple[Any, bool, bytes]:  # type: ignore[override] # as the compiled one
        """As aiohttp's; raises `_HeadTooLargeError`, too."""
        is_in_head = self._last_body.is_eof()
        messages, is_upgraded, tail = super().feed_data(data)
        if messages:
            self._num_head_bytes = 0
            self._last_body = messages[-1][1]
        elif is_in_head:
            self._num_head_bytes += len(data)
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLargeError("")
        return messages, is_upgraded, tail


class _Connection(web.RequestHandler):
    def __init__(self, server: _Server, metrics: Metrics, cors: Cors) -> None:
        loop = server._loop  # noqa: SLF001 - its base class has no public name for it
        super().__init__(server, loop=loop, access_log=None)  # type: ignore[arg-type] # aiohttp takes None
        self._parser = _Parser(self, loop)
        self._metrics = metrics
        self._cors = cors

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that is no HTTP, or whose handler has failed. The connection then ends.

        Raises:
            ConnectionError: a part of an answer has been sent.
        """
        headers = None
        if isinstance(exc, HttpProcessingError):
            headers = self._cors.headers_for_unknown_origin
            status, text = _refusal(exc)
            record = RequestRecord("", self._metrics)
            record.refused(status, text)
            record.end()
        else:
            super().handle_error(request, status, exc, message)  # which logs it
            text = "the proxy has failed; its log has the reason"
        body = error_body(HTTPStatus(status), text)
        response = web.Response(status=status, body=body, headers=headers, content_type="application/json")
        response.force_close()
        return response


def _refusal(error: HttpProcessingError) -> tuple[HTTPStatus, str]:
    """Status and reason for a request that cannot be parsed; the parser's own text may quote a secret header."""
    if isinstance(error, LineTooLong):
        text = f"the URL or a header is longer than {MAX_LINE_BYTES} bytes"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text
    if isinstance(error, _HeadTooLargeError):
        text = f"the URL and all headers together have more than {MAX_HEAD_BYTES} bytes"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text
    text = f"not a valid HTTP request ({type(error).__name__}), or one with more than {_MAX_HEADERS} headers"
    return HTTPStatus.BAD_REQUEST, text
