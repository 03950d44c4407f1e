"""`kvpipe worker` and `kvpipe queue`, and a proxy or a prefill node whose decode instances are behind a broker."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson
import uvloop

from kvpipe import proxy
from kvpipe.control import ControlClient
from kvpipe.exceptions import ConfigError
from kvpipe.proxy.api_keys import instances_authorization
from kvpipe.proxy.config import check_ca_file
from kvpipe.proxy.server import stop_signals, warn_of_unencrypted_key
from kvpipe.proxy.upstream import Upstream, open_session
from kvpipe.queue.front import DecodeQueue
from kvpipe.queue.letters import letters, replay
from kvpipe.queue.worker import DEFAULT_FROZEN_AFTER_S, DEFAULT_SLOTS, Worker

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvpipe.proxy import Instance, ProxyConfig
    from kvpipe.queue.topology import Topology

_REPLAY_TIMEOUT_S = 600.0
# Workers answer a front end that asks who is there.
_REPORTS_WITHIN_S = 1.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of a worker. Times are in seconds.

    Attributes:
        url: of the broker.
        topology: its queues.
        decode: D; without its control port D's metrics say what it is.
        num_slots: requests at once.
        token: shared secret for D's control port; None leaves the choice to the control client.
        instances_ca_file: as in `ProxyConfig`.
        instances_api_key_file: as in `ProxyConfig`.
        connect_timeout_s: limit for a connection to D.
        frozen_after_s: silence of a D that owes an answer, on HTTP and on its control port, after which it is
            frozen: it gets nothing, and other workers get its requests. Without a control port six times as long.
        silence_timeout_s: limit for a D without output.
        drain_timeout_s: time for requests to end after SIGTERM or SIGINT; then others get them.
    """

    url: str
    topology: Topology
    decode: Instance
    num_slots: int = DEFAULT_SLOTS
    token: str | None = None
    instances_ca_file: Path | None = None
    instances_api_key_file: Path | None = None
    connect_timeout_s: float = 5.0
    frozen_after_s: float = DEFAULT_FROZEN_AFTER_S
    silence_timeout_s: float = 600.0
    drain_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.num_slots < 1:
            message = f"slots={self.num_slots}: must be at least 1"
            raise ConfigError(message)
        check_ca_file(self.instances_ca_file, (self.decode,))
        for name in ("connect_timeout_s", "frozen_after_s", "silence_timeout_s", "drain_timeout_s"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                message = f"{name}={value!r}: must be more than 0 seconds, and finite"
                raise ConfigError(message)


def run_front(config: ProxyConfig, url: str, topology: Topology) -> None:
    """Serves as `kvpipe.proxy.run`, with a broker between the proxy and the decode instances."""
    has_client_keys = config.api_key_file is not None
    queue = DecodeQueue(url, topology, config.silence_timeout_s, has_client_keys=has_client_keys)
    proxy.run(config, queue)


def run_worker(config: WorkerConfig) -> None:
    """Takes requests until SIGTERM or SIGINT, then ends those that it has, and returns.

    A second signal meanwhile ends the process at once, and others get its requests.

    Raises:
        ConfigError: The broker refuses user, password or queues; a file cannot be read or used.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_work(config))


async def _work(config: WorkerConfig) -> None:
    with stop_signals() as stopped:
        control = ControlClient(token=config.token)
        key_file = config.instances_api_key_file
        authorization = None if key_file is None else instances_authorization(key_file)
        session = open_session(config.connect_timeout_s, config.silence_timeout_s, config.instances_ca_file)
        try:
            async with session:
                worker = Worker(
                    config.url,
                    config.topology,
                    config.decode,
                    num_slots=config.num_slots,
                    upstream=Upstream(session, config.silence_timeout_s, authorization),
                    control=control,
                    frozen_after_s=config.frozen_after_s,
                )
                if key_file is not None:
                    warn_of_unencrypted_key((config.decode,))
                logger.info("worker.started decode=%s slots=%s", config.decode.url, config.num_slots)
                await worker.run(stopped, config.drain_timeout_s)
        finally:
            control.close()
    logger.info("worker.stopped")


def show(action: str, ids: Sequence[str], url: str, topology: Topology) -> int:
    """Runs `kvpipe queue`: prints JSON lines, and returns the exit status."""
    if ids and action != "replay":
        message = f"kvpipe queue {action} {ids[0]}: takes no ids"
        raise ConfigError(message)
    if action == "list":
        for letter in asyncio.run(letters(url, topology)):
            _print(dataclasses.asdict(letter))
        return 0
    if action == "show":
        _print(asyncio.run(_state(url, topology)))
        return 0
    is_good = asyncio.run(replay(url, topology, ids, _REPLAY_TIMEOUT_S, _show_answer))
    return 0 if is_good else 1


def _show_answer(id: str, status: int, body: str) -> None:  # noqa: A002 - as in the messages
    _print({"id": id, "status": status, "answer": body})


def _print(value: object) -> None:
    sys.stdout.write(orjson.dumps(value).decode() + "\n")


async def _state(url: str, topology: Topology) -> dict[str, Any]:
    async with DecodeQueue(url, topology, _REPLAY_TIMEOUT_S) as queue:
        await asyncio.sleep(_REPORTS_WITHIN_S)
        return await queue.state()
