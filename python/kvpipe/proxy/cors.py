"""Cross-origin requests of browsers, by the rules of vLLM's CORS middleware (starlette's `CORSMiddleware`)."""

from dataclasses import dataclass
from http import HTTPStatus

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler

from kvpipe.proxy.bodies import error_body

_ALL = "*"
_ALL_METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
# Of the Fetch standard: these need no permission.
_SAFELISTED_HEADERS = ("Accept", "Accept-Language", "Content-Language", "Content-Type")
_MAX_AGE_S = 600


@dataclass(frozen=True, kw_only=True, slots=True)
class Cors:
    """Answers preflights, and adds headers to all other answers: errors and streams included.

    Attributes:
        origins: origins that may read answers; `*` is all of them.
        methods: methods that they may use; `*` is all of them.
        headers: headers that they may send; `*` is all of them.
        allow_credentials: true if a browser may send cookies and its own credentials.
    """

    origins: tuple[str, ...]
    methods: tuple[str, ...]
    headers: tuple[str, ...]
    allow_credentials: bool

    def install(self, app: web.Application) -> None:
        """Have all answers of an application follow these rules."""

        @web.middleware
        async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
            answer = self._preflight(request)
            return await handler(request) if answer is None else answer

        app.middlewares.append(answer_preflight)
        app.on_response_prepare.append(self._add_headers)

    @property
    def headers_for_unknown_origin(self) -> dict[str, str]:
        """Headers of an answer to a request whose origin cannot be read: those that are the same for all pages."""
        is_for_all = _ALL in self.origins and not self.allow_credentials
        return {hdrs.ACCESS_CONTROL_ALLOW_ORIGIN: _ALL} if is_for_all else {}

    def _preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a preflight; None to any other request."""
        origin, method = map(request.headers.get, (hdrs.ORIGIN, hdrs.ACCESS_CONTROL_REQUEST_METHOD))
        if request.method != hdrs.METH_OPTIONS or origin is None or method is None:
            return None
        wanted = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        methods = _ALL_METHODS if _ALL in self.methods else self.methods
        allowed = sorted({*_SAFELISTED_HEADERS, *self.headers})
        names = {name.strip().lower() for name in wanted.split(",")} - {""}
        checks = {
            "origin (--allowed-origins)": self._is_allowed(origin),
            "method (--allowed-methods)": method in methods,
            "headers (--allowed-headers)": _ALL in self.headers or names <= {name.lower() for name in allowed},
        }
        headers = {
            hdrs.VARY: "Origin, Access-Control-Request-Method, Access-Control-Request-Headers",
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: ", ".join(methods),
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: wanted if _ALL in self.headers else ", ".join(allowed),
            hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_S),
        }
        if refused := [name for name, is_allowed in checks.items() if not is_allowed]:
            body = error_body(HTTPStatus.BAD_REQUEST, f"Disallowed CORS {', '.join(refused)}")
            return web.Response(
                status=HTTPStatus.BAD_REQUEST, body=body, headers=headers, content_type="application/json"
            )
        return web.Response(text="OK", headers=headers)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        is_explicit = bool(self.origins) and (_ALL not in self.origins or self.allow_credentials)
        if is_explicit and "origin" not in response.headers.get(hdrs.VARY, "").lower():
            response.headers.add(hdrs.VARY, "Origin")
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not self._is_allowed(origin):
            return
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin if is_explicit else _ALL
        if self.allow_credentials:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_CREDENTIALS] = "true"

    def _is_allowed(self, origin: str) -> bool:
        return _ALL in self.origins or origin in self.origins
