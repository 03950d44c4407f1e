"""Serves the application until a signal, then drains it."""

import asyncio
import logging
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from urllib.parse import urlsplit

import uvloop
from aiohttp import web

from kvpipe.control import ControlClient
from kvpipe.proxy.app import create_app
from kvpipe.proxy.config import ProxyConfig
from kvpipe.proxy.connections import Runner
from kvpipe.proxy.control import Control
from kvpipe.proxy.instances import Instance
from kvpipe.proxy.tls import server_context
from kvpipe.proxy.upstream import DecodeQueue

# 200 clients that connect at once overflow asyncio's 100; the kernel caps this at somaxconn.
_BACKLOG = 1024
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

logger = logging.getLogger(__name__)


def run(config: ProxyConfig, queue: DecodeQueue | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    A second signal while draining ends the process at once. The producers' leases then free what was not released.

    Raises:
        ConfigError: a file with a certificate or a key cannot be read or used.
        OSError: the port cannot be listened on.
    """

    async def main() -> None:
        control = ControlClient(token=config.token)
        try:
            await serve(config, control, queue)
        finally:
            control.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def serve(config: ProxyConfig, control: Control, queue: DecodeQueue | None = None) -> None:
    """As `run`, in a running loop on the main thread, with the caller's control client."""
    runner = create_runner(config, control, queue)
    try:
        with stop_signals() as stopped:
            await listen(runner, config)
            _warn(config, [address[0] for address in runner.addresses])
            host, port = runner.addresses[0][:2]
            logger.info(
                "proxy.listening host=%s port=%s tls=%s dispatch=%s early_token=%s split_from=%s",
                host,
                port,
                "off" if config.ssl_certfile is None else "on",
                config.dispatch,
                "on" if config.early_token else "off",
                config.split_from,
            )
            await stopped.wait()
        logger.info("proxy.draining timeout_s=%s", config.drain_timeout_s)
    finally:
        await runner.cleanup()
    logger.info("proxy.stopped")


def _warn(config: ProxyConfig, hosts: list[str]) -> None:
    """Logs what others can read or use at the addresses that are listened on, and at instances."""
    if not all(map(_is_loopback, hosts)):
        if config.api_key_file is not None and config.ssl_certfile is None:
            logger.warning(
                "proxy.unencrypted API keys and prompts can be read on the network: add --ssl-certfile and "
                "--ssl-keyfile, unless TLS ends at a gateway in front of this proxy"
            )
        if config.api_key_file is None and config.instances_api_key_file is not None:
            logger.warning(
                "proxy.unauthenticated every client uses the key of --instances-api-key-file: add --api-key-file, "
                "unless a gateway in front of this proxy authenticates clients"
            )
    if config.instances_api_key_file is not None:
        warn_of_unencrypted_key((*config.prefill, *config.decode))


def warn_of_unencrypted_key(instances: Iterable[Instance]) -> None:
    """Logs each URL that gets the API key of instances over a network without TLS."""
    for url in dict.fromkeys(instance.url for instance in instances):
        parts = urlsplit(url)
        if parts.scheme == "http" and not _is_loopback(parts.hostname or ""):
            logger.warning(
                "instance.unencrypted url=%s the key of --instances-api-key-file can be read on the network: give the "
                "instance a certificate, and write https://",
                url,
            )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def create_runner(config: ProxyConfig, control: Control, queue: DecodeQueue | None = None) -> web.AppRunner:
    """The application as a runner that needs a socket; `cleanup` drains it."""
    return Runner(
        create_app(config, control, queue),
        # aiohttp waits for handlers this long, twice, before it cancels them.
        shutdown_timeout=config.drain_timeout_s / 2,
    )


async def listen(runner: web.AppRunner, config: ProxyConfig) -> None:
    """Set a runner of `create_runner` up, and serve on the configured port, by TLS where there is a certificate.

    Raises:
        ConfigError: a file with a certificate or a key cannot be read or used.
        OSError: the port cannot be listened on.
    """
    context = server_context(config.ssl_certfile, config.ssl_keyfile)
    await runner.setup()
    await web.TCPSite(runner, config.host, config.port, backlog=_BACKLOG, ssl_context=context).start()


@contextmanager
def stop_signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM or SIGINT sets; the next signal is left to the default handler."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()

    def restore() -> None:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)

    def stop() -> None:
        restore()
        stopped.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, stop)
    try:
        yield stopped
    finally:
        restore()
