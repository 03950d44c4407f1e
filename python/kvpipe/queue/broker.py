"""A connection to the broker that is made again whenever it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar

import aio_pika
from aio_pika.exceptions import (
    AMQPError,
    AuthenticationError,
    ChannelInvalidStateError,
    ChannelNotFoundEntity,
    ProbableAuthenticationError,
)
from yarl import URL

from kvpipe._redaction import redact
from kvpipe.exceptions import ConfigError, KVPipeError
from kvpipe.proxy.silence import wait_awake

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence

    from aio_pika.abc import AbstractChannel, AbstractConnection, AbstractMessage

# A broker that does not answer is given up after three of these.
_HEARTBEAT_S = 10
# For calls that the broker answers. The client library forgets some of those that the end of a connection interrupts.
CALL_TIMEOUT_S = 10.0
_CONNECT_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 1.0
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.1, 1.0
# Errors of a broker that cannot be used, or not now.
BROKER_ERRORS = (AMQPError, ChannelInvalidStateError, OSError, TimeoutError)

logger = logging.getLogger(__name__)


class Link(Protocol):
    """Channels and queues of its user on one connection."""

    @property
    def channels(self) -> tuple[AbstractChannel, ...]:
        """Its channels; a broker closes one that was used wrongly."""

    def lost(self, error: BaseException | None) -> None:
        """The connection, or one of the channels, has ended by this error: nothing can be sent or settled any more."""


L = TypeVar("L", bound=Link)
T = TypeVar("T")


class Broker(Generic[L]):
    """Connects, and connects again.

    Args:
        url: `amqp://` or `amqps://`, with user, password, host, port and virtual host.
        name: name of this connection at the broker.
        open_link: opens channels, queues and consumers on a new connection.
    """

    def __init__(self, url: str, name: str, open_link: Callable[[AbstractConnection], Coroutine[Any, Any, L]]) -> None:
        self._url = checked_url(url).update_query(heartbeat=_HEARTBEAT_S, name=name)
        self._open_link = open_link
        self._link: L | None = None
        self._is_open = asyncio.Event()
        self._reason = "not connected yet"
        self._keeping: asyncio.Task[None] | None = None
        self._is_tried = asyncio.Event()

    @property
    def address(self) -> str:
        """The broker's address, without user and password."""
        return f"{self._url.scheme}://{self._url.host}:{self._url.port or ''}".rstrip(":")

    @property
    def link(self) -> L | None:
        """Channels and queues that are open now."""
        return self._link

    async def until_open(self) -> L:
        """Waits for a connection, and returns its link."""
        while self._link is None:
            await self._is_open.wait()
        return self._link

    @property
    def reason(self) -> str:
        """Reason for which nothing is open."""
        return self._reason

    async def __aenter__(self) -> Self:
        """Connects. A broker that cannot be reached is tried again in the background.

        Raises:
            ConfigError: The broker refuses user, password or queues.
        """
        self._keeping = asyncio.create_task(self._keep())
        tried = asyncio.create_task(self._is_tried.wait())
        await asyncio.wait({tried, self._keeping}, return_when=asyncio.FIRST_COMPLETED)
        tried.cancel()
        if self._keeping.done():
            self._keeping.result()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with contextlib.suppress(asyncio.CancelledError, KVPipeError):
                await self._keeping

    async def _keep(self) -> None:
        delay_s = _FIRST_DELAY_S
        while True:
            try:
                await self._use_connection()
            except (AuthenticationError, ProbableAuthenticationError) as error:
                self._refused(f"broker {self.address}: user and password are refused", error)
            except ConfigError as error:
                self._refused(str(error), error)
            except Exception as error:  # noqa: BLE001 - the client library raises many; each ends a connection
                self._note(str(error) or type(error).__name__)
            else:
                delay_s = _FIRST_DELAY_S
            self._is_tried.set()
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, _LONGEST_DELAY_S)

    async def _use_connection(self) -> None:
        connection = await aio_pika.connect(self._url, timeout=_CONNECT_TIMEOUT_S)
        try:
            link = await called(self._open_link(connection))
            self._link, self._reason = link, ""
            self._is_tried.set()
            self._is_open.set()
            logger.info("broker.connected address=%s", self.address)
            error = None
            try:
                error = await _first_end(connection, link.channels)
            finally:
                self._link = None
                self._is_open.clear()
                link.lost(error)
            self._note(str(error or "") or "the connection was closed")
        finally:
            with contextlib.suppress(*BROKER_ERRORS):
                await called(connection.close(), _CLOSE_TIMEOUT_S)

    def _note(self, reason: str) -> None:
        if reason != self._reason:
            logger.warning("broker.lost address=%s: %s", self.address, reason)
        self._reason = reason

    def _refused(self, message: str, error: Exception) -> None:
        """Ends the program at its start; later the settings may be mended at the broker."""
        if not self._is_tried.is_set():
            raise ConfigError(message) from error
        self._note(message)


async def called(work: Awaitable[T], timeout_s: float = CALL_TIMEOUT_S) -> T:
    """Returns the result of a call to the broker. Time in which this process got no CPU counts little.

    Raises:
        TimeoutError: The broker does not answer, or the end of a connection has interrupted the call.
    """
    task = asyncio.ensure_future(work)
    try:
        await wait_awake({task}, timeout_s)
    finally:
        if not task.done():
            task.cancel()
    # The client library cancels those who wait when it ends its own tasks.
    if not task.done() or task.cancelled():
        message = "no answer in time"
        raise TimeoutError(message)
    return task.result()


# Calls whose callers may have left.
_uncut: set[asyncio.Task[Any]] = set()


async def uncut(work: Coroutine[Any, Any, T]) -> T:
    """Returns the result of calls that go on where the caller is cancelled, up to limits of their own.

    Half an exchange about a channel is an error of the whole connection.
    """
    task = asyncio.create_task(work)
    _uncut.add(task)
    task.add_done_callback(_forget)
    return await asyncio.shield(task)


def _forget(task: asyncio.Task[Any]) -> None:
    _uncut.discard(task)
    if not task.cancelled():
        task.exception()  # the caller has it, or has left


async def publish_alone(
    connection: AbstractConnection, message: AbstractMessage, queue: str, timeout_s: float, *, mandatory: bool = True
) -> None:
    """Publishes to a queue on a channel of its own, and returns once the broker has the message.

    A broker closes the channel of a message that it refuses.
    """
    has_left = False

    async def publish() -> None:
        channel = await called(connection.channel(publisher_confirms=True, on_return_raises=True))
        try:
            if not has_left:
                await called(channel.default_exchange.publish(message, queue, mandatory=mandatory), timeout_s)
        finally:
            with contextlib.suppress(*BROKER_ERRORS):
                await called(channel.close())

    try:
        await uncut(publish())
    except asyncio.CancelledError:
        has_left = True
        raise


async def num_consumers(connection: AbstractConnection, queue: str) -> int | None:
    """Returns the number of consumers of a queue; `None` if the broker has no such queue."""

    async def ask() -> int | None:
        # A channel of its own: the broker closes it where there is no such queue.
        channel = await called(connection.channel(publisher_confirms=False))
        try:
            found = await called(channel.declare_queue(queue, passive=True))
        except ChannelNotFoundEntity:
            return None
        finally:
            with contextlib.suppress(*BROKER_ERRORS):
                await called(channel.close())
        return found.declaration_result.consumer_count

    return await uncut(ask())


async def _first_end(connection: AbstractConnection, channels: Sequence[AbstractChannel]) -> BaseException | None:
    """Waits for the first end of a connection, one of its channels or a consumer, and returns its error."""
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    def note(_: object, error: BaseException | None = None) -> None:
        if not ended.done():
            ended.set_result(error)

    connection.close_callbacks.add(note)
    for channel in channels:
        channel.close_callbacks.add(note)
        (await channel.get_underlay_channel()).on_consumer_cancel_callbacks.add(note)
    if connection.is_closed or any(channel.is_closed for channel in channels):
        return None
    return await ended


def checked_url(url: str) -> URL:
    """The URL of a broker.

    Raises:
        ConfigError: It is none.
    """
    try:
        parsed = URL(url)
        is_broker = parsed.scheme in {"amqp", "amqps"} and parsed.host and "@" not in parsed.path + parsed.fragment
    except ValueError:
        is_broker = False
    if not is_broker:
        expected = "amqp://user:password@host:port/vhost, where user, password and vhost are percent-encoded"
        message = f"AMQP URL {redact(url)!r}: expected {expected}"
        raise ConfigError(message)
    return parsed
