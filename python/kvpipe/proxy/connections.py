"""Connections of clients. What aiohttp's HTTP parser refuses is counted, and gets an error in OpenAI's form."""

from http import HTTPStatus

from aiohttp import web
from aiohttp.http import HttpProcessingError
from aiohttp.http_exceptions import LineTooLong

from kvpipe.proxy.bodies import error_body
from kvpipe.proxy.headers import MAX_LINE_BYTES
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.request_record import RequestRecord

METRICS = web.AppKey("metrics", Metrics)

# As vLLM's `--h11-max-header-count`.
_MAX_HEADERS = 256


class Runner(web.AppRunner):
    """Runs the proxy's application, which has its metrics as `METRICS`; arguments as those of `web.AppRunner`."""

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(server, self.app[METRICS])


class _Server(web.Server):
    def __init__(self, server: web.Server, metrics: Metrics) -> None:
        super().__init__(server.request_handler, request_factory=server.request_factory, handler_cancellation=True)
        self._metrics = metrics

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, self._metrics)


class _Connection(web.RequestHandler):
    def __init__(self, server: _Server, metrics: Metrics) -> None:
        super().__init__(
            server,
            loop=server._loop,  # noqa: SLF001 - its base class has no public name for it
            access_log=None,  # type: ignore[arg-type] # aiohttp takes None
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=_MAX_HEADERS,
        )
        self._metrics = metrics

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
        if isinstance(exc, HttpProcessingError):
            status, text = _refusal(exc)
            record = RequestRecord("", self._metrics)
            record.refused(status, text)
            record.end()
        else:
            super().handle_error(request, status, exc, message)  # which logs it
            text = "the proxy has failed; its log has the reason"
        body = error_body(HTTPStatus(status), text)
        response = web.Response(status=status, body=body, content_type="application/json")
        response.force_close()
        return response


def _refusal(error: HttpProcessingError) -> tuple[HTTPStatus, str]:
    """Status and reason for a request that cannot be parsed; the parser's own text may quote a secret header."""
    if isinstance(error, LineTooLong):
        text = f"the URL or a header is longer than {MAX_LINE_BYTES} bytes"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text
    text = f"not a valid HTTP request ({type(error).__name__}), or one with more than {_MAX_HEADERS} headers"
    return HTTPStatus.BAD_REQUEST, text
