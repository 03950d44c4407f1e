"""`kvpipe store`: serves a store, and looks at one."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from threading import Event
from typing import TYPE_CHECKING

from kvpipe._address import join_host_port
from kvpipe._help import add_examples
from kvpipe.exceptions import ConfigError
from kvpipe.store.server import StoreServer
from kvpipe.store.urls import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# Keys of one call that deletes.
_PURGED_AT_ONCE = 10_000

logger = logging.getLogger(__name__)

# The ends of --help: of all commands, and of each.
_EXAMPLES = {
    "": ("kvpipe store serve --capacity 32GiB", "kvpipe store stats kvpipe://127.0.0.1:7300"),
    "serve": (
        "kvpipe store serve --listen 10.0.0.1:7300 --capacity 32GiB --disk /var/lib/kvpipe --disk-capacity 1TiB",
    ),
    "list": ("kvpipe store list kvpipe://127.0.0.1:7300",),
    "stats": ("kvpipe store stats kvpipe://127.0.0.1:7300",),
    "purge": ("kvpipe store purge kvpipe://127.0.0.1:7300",),
}


def main(argv: Sequence[str]) -> int:
    """Runs one command and returns its exit status."""
    args = parser().parse_args(argv)
    return int(args.command(args))


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `kvpipe store`."""
    whole = argparse.ArgumentParser(
        prog="kvpipe store", description="A database that keeps KV for later use by other instances."
    )
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve values from the memory of this machine until SIGTERM or SIGINT")
    serve.add_argument(
        "--listen",
        default="127.0.0.1:7300",
        metavar="HOST:PORT",
        help="default 127.0.0.1:7300; port 0 picks a free one",
    )
    serve.add_argument("--capacity", type=_num_bytes, default="4GiB", metavar="SIZE", help="memory, default 4GiB")
    serve.add_argument(
        "--quota", type=_num_bytes, metavar="SIZE", help="how much of the memory the values of one namespace may take"
    )
    serve.add_argument("--disk", metavar="DIRECTORY", help="keep values there too: beyond memory, and after a restart")
    serve.add_argument("--disk-capacity", type=_num_bytes, metavar="SIZE", help="how much the values there may be")
    serve.add_argument(
        "--metrics-port", type=int, metavar="PORT", help="serve /metrics there, at the address of --listen"
    )
    serve.set_defaults(command=_serve)
    for name, about, command in (
        ("list", "print the values: size, state, key in hexadecimal digits", _list),
        ("stats", "print content and counters", _stats),
        ("purge", "delete the values that are neither open nor leased", _purge),
    ):
        looking = commands.add_parser(name, help=about)
        looking.add_argument("url", metavar="URL", help="such as kvpipe://host:port")
        looking.set_defaults(command=command)
    for each in commands.choices.values():
        each.add_argument("--token", help="shared secret; better in KVPIPE_TOKEN, or KVPIPE_TOKEN_FILE")
    for name, examples in _EXAMPLES.items():
        add_examples(commands.choices[name] if name else whole, examples)
    return whole


def _serve(args: argparse.Namespace) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
    stopped = Event()

    def stop(_: int, __: FrameType | None) -> None:
        stopped.set()

    with ExitStack() as stack:
        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, stop))
        server = StoreServer(
            args.listen,
            capacity_bytes=args.capacity,
            quota_bytes=args.quota,
            token=args.token,
            disk=args.disk,
            disk_capacity_bytes=args.disk_capacity,
        )
        stack.callback(server.close)
        if args.metrics_port is not None:
            _serve_metrics(stack, server, args.metrics_port)
        logger.info("store.listening address=%s capacity_bytes=%s", server.address, args.capacity)
        if args.disk is not None:
            num_values = server.stats().details["num_disk_values"]
            logger.info("store.disk directory=%s num_values=%s", args.disk, num_values)
        print(server.url, flush=True)
        stopped.wait()
    logger.info("store.stopped")
    return 0


def _serve_metrics(stack: ExitStack, server: StoreServer, port: int) -> None:
    try:
        from kvpipe.store.metrics import StoreMetrics  # of an extra
    except ModuleNotFoundError as error:
        if error.name != "prometheus_client":
            raise
        message = "prometheus_client is not installed; pip install 'kvpipe[proxy]', or leave out --metrics-port"
        raise ConfigError(message) from error
    host = server.address.rpartition(":")[0].strip("[]")
    try:
        web, thread = StoreMetrics(server.stats).serve(host, port)
    except (OSError, OverflowError) as error:
        message = f"--metrics-port {port}: cannot listen on {join_host_port(host, port)}: {error}"
        raise ConfigError(message) from error
    stack.callback(thread.join)
    stack.callback(web.server_close)
    stack.callback(web.shutdown)
    logger.info("store.metrics url=http://%s:%s/metrics", *web.server_address[:2])


def _list(args: argparse.Namespace) -> int:
    with open_store(args.url, args.token) as store:
        for value in store.list():
            print(f"{value.num_bytes:12} {'leased' if value.is_leased else 'stored'} {value.key.hex()}")
    return 0


def _stats(args: argparse.Namespace) -> int:
    with open_store(args.url, args.token) as store:
        facts = asdict(store.stats())
    for name, value in (facts | facts.pop("details")).items():
        if name != "details":
            print(f"{name}: {value}")
    return 0


def _purge(args: argparse.Namespace) -> int:
    num_deleted = 0
    with open_store(args.url, args.token) as store:
        keys = [value.key for value in store.list()]
        for start in range(0, len(keys), _PURGED_AT_ONCE):
            num_deleted += store.delete(keys[start : start + _PURGED_AT_ONCE])
    print(f"deleted: {num_deleted} of {len(keys)}")
    return 0


def _num_bytes(text: str) -> int:
    """A size such as 4GiB or 512M; all units are powers of 1024."""
    found = re.fullmatch(r"(\d+) ?([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if not found:
        message = f"{text!r}: expected a size such as 4GiB"
        raise argparse.ArgumentTypeError(message)
    return int(found[1]) * _UNITS[found[2].upper()]
