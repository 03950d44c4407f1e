"""HTTP client of the instances. Every failure of an exchange is an `InstanceError`."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import aiohttp

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy import tls
from kvpipe.proxy.aborts import ABORT_REASON, AbortCheck, ends_without_choice, is_aborted, may_end_without_choice
from kvpipe.proxy.bodies import error_in_first_event, may_begin_with_error
from kvpipe.proxy.headers import MAX_LINE_BYTES, has_control_character, response_headers
from kvpipe.proxy.silence import PIECE_BYTES, silence_limit, silent_for

if TYPE_CHECKING:
    import asyncio
    from collections.abc import AsyncIterator, Awaitable
    from pathlib import Path

    from multidict import CIMultiDict

    from kvpipe.proxy.files import Reloaded
    from kvpipe.proxy.instances import Instance

Role = Literal["prefill", "decode"]
# Kind of an instance's failure: no connection; silence after it was reached; a reset or a broken answer; a server
# error; a stream that contradicts the early token; no broker or instance that takes requests, or no broker that takes
# one so large; as many instances as may be asked; silence of all its ports while another instance can be asked.
Failure = Literal[
    "unreached", "timeout", "broken", "answered", "contradicted", "unavailable", "too_large", "given_up", "frozen"
]
# Gets the address of the control port of a D behind a broker that has begun with an answer: several may in turn.
WhenBegun = Callable[[str], None]

# vLLM's uvicorn closes a connection that was idle for 5 s (VLLM_HTTP_TIMEOUT_KEEP_ALIVE). A POST that races with that
# close fails and cannot safely be repeated, so the proxy closes idle connections well before.
_KEEPALIVE_S = 2.0
_WRONG_KEY = "refuses the key of --instances-api-key-file: start it with this key among those of --api-key"
_NO_KEY_FOR_IT = "wants an API key of its own: name it by --instances-api-key-file"
_STATUSES: dict[Failure, HTTPStatus] = {
    "timeout": HTTPStatus.GATEWAY_TIMEOUT,
    "unavailable": HTTPStatus.SERVICE_UNAVAILABLE,
    "frozen": HTTPStatus.SERVICE_UNAVAILABLE,
    "too_large": HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
}


class InstanceError(KVPipeError):
    """An instance failed a request.

    Attributes:
        role: the role in which it was asked.
        instance: the instance.
        reason: text of the failure, without the instance's name.
        failure: the kind of failure.
        answer: the error response, if there was one.
    """

    def __init__(
        self,
        role: Role,
        instance: Instance,
        reason: str,
        failure: Failure,
        answer: Answer | None = None,
    ) -> None:
        super().__init__(f"{role} instance {instance.name}: {reason}")
        self.role: Role = role
        self.instance = instance
        self.reason = reason
        self.failure: Failure = failure
        self.answer = answer

    @property
    def has_broken_off(self) -> bool:
        """True if the request may have ended the engine; vLLM answers 500 to the requests of an engine that died."""
        is_500 = self.answer is not None and self.answer.status == HTTPStatus.INTERNAL_SERVER_ERROR
        return self.failure == "broken" or is_500

    def is_of_server(self, *, names_rank: bool) -> bool:
        """True if all data-parallel ranks of the server have failed: they share its HTTP port, or vLLM chose one."""
        return self.failure in ("unreached", "frozen") or not names_rank

    @property
    def status(self) -> HTTPStatus:
        """HTTP status for the client."""
        return _STATUSES.get(self.failure, HTTPStatus.BAD_GATEWAY)


class Stream(Protocol):
    """The rest of a stream that an instance sends."""

    async def piece(self) -> bytes:
        """Returns the next bytes, none at the end.

        Raises:
            InstanceError: the instance died, or sent nothing for the silence timeout.
        """

    def close(self) -> None:
        """End it, which aborts the request in vLLM."""


@dataclass(frozen=True, slots=True)
class _HttpStream:
    role: Role
    instance: Instance
    response: aiohttp.ClientResponse
    silence_timeout_s: float
    check: AbortCheck = field(default_factory=AbortCheck)

    async def read(self) -> bytes:
        """As `piece`, with aiohttp's errors."""
        shown = b"" if self.check.has_found else self.check.feed(await self.response.content.readany())
        if self.check.has_found and not shown:
            raise InstanceError(self.role, self.instance, ABORT_REASON, "broken")
        return shown

    async def piece(self) -> bytes:
        try:
            return await self.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = f"failed in mid-stream: {_describe(error, self.silence_timeout_s)}"
            raise _instance_error(self.role, self.instance, error, reason) from error

    def close(self) -> None:
        self.response.close()


@dataclass(slots=True)
class Answer:
    """An instance's answer: complete, or a stream with its first bytes.

    Attributes:
        status: HTTP status.
        headers: headers for the client.
        body: all bytes, or the first bytes of a stream; empty for a stream that has not begun.
        stream: the rest of an unfinished stream; `close` ends it.
        is_complete: true if the last byte has arrived.
        first_bytes: waits for the first bytes of a stream that has not begun.
    """

    role: Role
    instance: Instance
    status: int
    headers: CIMultiDict[str]
    body: bytes
    stream: Stream | None = None
    is_complete: bool = True
    first_bytes: asyncio.Task[bytes] | None = None

    async def begin(self) -> bytes:
        """Returns the first bytes of a stream.

        Raises:
            InstanceError: as `rest`, or the stream is empty, or its first event is a server error.
        """
        first = await _first_bytes(self.role, self.instance, self.piece)
        error = error_in_first_event(first)
        if error is not None and error[0] >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise failed(self._replaced_by(*error))
        return first

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields all bytes, as they arrive; raises as `rest`."""
        if self.body:
            yield self.body
        async for piece in self.rest():
            yield piece

    async def rest(self) -> AsyncIterator[bytes]:
        """Yields the bytes after `body`, as they arrive.

        Raises:
            InstanceError: the instance died, or sent nothing for the silence timeout.
        """
        while self.stream is not None and (piece := await self.piece()):
            yield piece

    async def piece(self) -> bytes:
        """Returns the next bytes of a stream, none at its end; raises as `rest`."""
        if self.stream is None:
            return b""
        piece = await self.stream.piece()
        self.is_complete = not piece
        return piece

    def with_first_event_checked(self) -> Answer:
        """The error in the first event as a complete answer with its status; else this answer."""
        error = error_in_first_event(self.body)
        return self if error is None else self._replaced_by(*error)

    def close(self) -> None:
        """Close the connection of an unfinished stream, which aborts the request in vLLM."""
        if self.first_bytes is not None:
            self.first_bytes.cancel()
        if self.stream is not None:
            self.stream.close()

    def _replaced_by(self, status: int, body: bytes) -> Answer:
        if self.stream is not None:
            self.stream.close()
        headers = self.headers.copy()
        headers["Content-Type"] = "application/json"
        return Answer(self.role, self.instance, status, headers, body)


def failed(answer: Answer) -> InstanceError:
    """Turns a server error into an `InstanceError`."""
    excerpt = answer.body[:200].decode(errors="replace")
    return InstanceError(answer.role, answer.instance, f"answered {answer.status}: {excerpt}", "answered", answer)


class DecodeQueue(Protocol):
    """The decode instances behind a broker; `kvpipe.queue.front.DecodeQueue` is one."""

    async def __aenter__(self) -> Self:
        """Connect to the broker."""

    async def __aexit__(self, *_: object) -> None: ...

    def check(self, num_bytes: int = 0) -> None:
        """Raises `InstanceError` while no request can be queued, or none with a body of so many bytes."""

    def describe(self) -> dict[str, Any] | None:
        """The description that all of these instances have; None if they differ, or none is known."""

    def health(self) -> str:
        """`ok`, or why no instance answers."""

    async def state(self) -> dict[str, Any]:
        """The queues and the workers; raises as `check`."""

    async def post(
        self,
        path: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        awaits_first_byte: bool,
        when_begun: WhenBegun | None,
    ) -> Answer:
        """As `Upstream.post`."""


class Upstream:
    """Sends requests to instances over one shared session.

    Args:
        session: made by `open_session`; the caller closes it.
        silence_timeout_s: limit for an instance that takes no byte of a request, or sends none of an answer. The
            session's `sock_read` limits the time between bytes of a stream that has begun.
        authorization: the header `Authorization` of all requests; None leaves it to each request.
        has_client_keys: true if the keys of clients end at the proxy: then a 401 is no fault of a client.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        silence_timeout_s: float,
        authorization: Reloaded[str] | None = None,
        *,
        has_client_keys: bool = False,
    ) -> None:
        self._session = session
        self._silence_timeout_s = silence_timeout_s
        self._authorization = authorization
        self._has_client_keys = has_client_keys

    async def post(
        self,
        role: Role,
        instance: Instance,
        path: str,
        headers: CIMultiDict[str],
        body: bytes,
        *,
        awaits_first_byte: bool = True,
    ) -> Answer:
        """Post a body; any status is an answer. Cancelling closes the connection.

        Without `awaits_first_byte`, the answer to a stream returns once its headers have arrived.

        Raises:
            InstanceError: the instance was not reached, broke off, or sent nothing for too long.
        """
        return await self._exchange(role, instance, path, headers, body, awaits_first_byte=awaits_first_byte)

    async def get(self, role: Role, instance: Instance, path: str, headers: CIMultiDict[str]) -> Answer:
        """As `post`, without a body."""
        return await self._exchange(role, instance, path, headers)

    async def _exchange(
        self,
        role: Role,
        instance: Instance,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | None = None,
        *,
        awaits_first_byte: bool = True,
    ) -> Answer:
        method = "GET" if body is None else "POST"
        data: bytes | AsyncIterator[bytes] | None = body
        if self._authorization is not None:
            headers = headers.copy()
            headers["Authorization"] = self._authorization.current()
        try:
            async with silence_limit(self._silence_timeout_s) as moved:
                if body is not None and len(body) > PIECE_BYTES:
                    headers = headers.copy()
                    headers["Content-Length"] = str(len(body))  # without it, aiohttp sends chunks
                    data = _pieces(body, moved)
                url = instance.url + path
                response = await self._session.request(method, url, headers=headers, data=data, allow_redirects=False)
                moved()
                if response.status == HTTPStatus.UNAUTHORIZED and (self._authorization or self._has_client_keys):
                    response.close()
                    reason = _WRONG_KEY if self._authorization else _NO_KEY_FOR_IT
                    raise InstanceError(role, instance, reason, "answered")
                stream = _HttpStream(role, instance, response, self._silence_timeout_s)
                return await _read(stream, moved, awaits_first_byte=awaits_first_byte)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise _instance_error(role, instance, error, _describe(error, self._silence_timeout_s)) from error


def open_session(
    connect_timeout_s: float, silence_timeout_s: float, ca_file: Path | None = None
) -> aiohttp.ClientSession:
    """Open the session to all instances: no limit on connections, bytes unchanged.

    Certificates of instances have to be signed by a CA certificate in `ca_file`, or else by one that the system trusts.

    Raises:
        ConfigError: the file cannot be read, or has no certificate.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ssl=tls.instances_context(ca_file)),
        timeout=aiohttp.ClientTimeout(
            total=None,
            connect=connect_timeout_s,
            sock_read=silence_timeout_s,
        ),
        headers={"Accept-Encoding": "identity"},
        skip_auto_headers=("User-Agent", "Content-Type"),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        max_line_size=MAX_LINE_BYTES,
        max_field_size=MAX_LINE_BYTES,
    )


async def _pieces(body: bytes, moved: Callable[[], None]) -> AsyncIterator[bytes]:
    """The body in pieces; the next one is asked for when the instance has room for it."""
    for begin in range(0, len(body), PIECE_BYTES):
        moved()
        yield body[begin : begin + PIECE_BYTES]
    moved()


async def _read(stream: _HttpStream, moved: Callable[[], None], *, awaits_first_byte: bool) -> Answer:
    """Read all of a response, or the first bytes of a stream; close it when interrupted.

    Raises:
        InstanceError: the instance has aborted the request, the stream is empty, or a header cannot be passed on.
    """
    role, instance, response = stream.role, stream.instance, stream.response
    try:
        headers = _headers(role, instance, response)
        if response.status == HTTPStatus.OK and response.content_type == "text/event-stream":
            first = await _first_bytes(role, instance, stream.read, moved) if awaits_first_byte else b""
            answer = Answer(role, instance, response.status, headers, first, stream, is_complete=False)
            return answer.with_first_event_checked()
        return Answer(role, instance, response.status, headers, await _whole(role, instance, response, moved))
    except BaseException:
        response.close()
        raise


def _headers(role: Role, instance: Instance, response: aiohttp.ClientResponse) -> CIMultiDict[str]:
    headers = response_headers(response.headers)
    if has_control_character(headers):
        raise InstanceError(role, instance, "its answer has a control character in a header", "broken")
    return headers


async def _whole(role: Role, instance: Instance, response: aiohttp.ClientResponse, moved: Callable[[], None]) -> bytes:
    pieces = []
    async for piece in response.content.iter_any():
        moved()
        pieces.append(piece)
    body = b"".join(pieces)
    if is_aborted(body):
        raise InstanceError(role, instance, ABORT_REASON, "broken")
    return body


async def _first_bytes(
    role: Role, instance: Instance, read: Callable[[], Awaitable[bytes]], moved: Callable[[], None] = lambda: None
) -> bytes:
    """Reads as much of a stream as shows whether it begins with an error, or has no answer.

    Raises:
        InstanceError: the stream is empty, or the instance has aborted the request.
    """
    first = await read()
    if not first:
        raise InstanceError(role, instance, "ended its stream before the first event", "broken")
    while (may_begin_with_error(first) or may_end_without_choice(first)) and (piece := await read()):
        moved()
        first += piece
    if ends_without_choice(first):
        raise InstanceError(role, instance, ABORT_REASON, "broken")
    return first


def _instance_error(role: Role, instance: Instance, error: Exception, reason: str) -> InstanceError:
    failure: Failure = "broken"
    if isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        failure = "unreached"
    elif isinstance(error, TimeoutError):
        failure = "timeout"
    return InstanceError(role, instance, reason, failure)


def _connect_error_reason(error: aiohttp.ClientConnectorError) -> str:
    if isinstance(error.__cause__, ssl.SSLError):
        return tls.failure(error.__cause__)
    return f"cannot connect: {error.os_error.strerror or error.os_error}"


def _describe(error: Exception, silence_timeout_s: float) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return _connect_error_reason(error)
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return "cannot connect in time (--connect-timeout)"
    if isinstance(error, TimeoutError):
        return silent_for(silence_timeout_s)
    if isinstance(error, aiohttp.ClientResponseError):  # its text may quote a header
        return f"its answer is not valid HTTP, or has a header of more than {MAX_LINE_BYTES} bytes"
    # Their texts may quote the answer, or have all its headers.
    if isinstance(error, (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError)):
        return "its answer does not come, or breaks off"
    # The operating system's own words; the text of any other error may quote what was sent.
    reason = error.strerror if isinstance(error, OSError) else None
    return reason or type(error).__name__
