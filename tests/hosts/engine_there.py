"""Prefill engines on another host, for tests/hosts/engines.py: vLLM's scheduler and a worker role, without a model."""

import os
import select
import socket
import struct
import sys
from pathlib import Path

# stdout is for the test.
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"

import tests.vllm.handoff.conftest  # noqa: F401 - sets vLLM up
from kvpipe.transfer_params import produce
from tests.e2e.groups import tiny_model
from tests.peers import say
from tests.vllm.handoff.engine import Engine, engine_config
from tests.vllm.handoff.test_scheduler import prompt
from tests.vllm.handoff.test_worker import caches, role

_LISTENING = "0A"
LENGTH = 100


def listening() -> list[str]:
    """The addresses on which this host listens, as `host:port`, sorted."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ports = [row[1].split(":") for row in rows if row[3] == _LISTENING]
    return sorted(f"{socket.inet_ntoa(struct.pack('=I', int(host, 16)))}:{int(port, 16)}" for host, port in ports)


def main(agent_ports: str) -> None:
    """Runs one engine for each line of stdin, which has its `listen` and `advertise`: importing vLLM takes longest."""
    while line := sys.stdin.readline():
        listen, advertise = line.split()
        run(listen=listen, advertise=advertise, agent_ports=agent_ports)


def run(**addresses: str) -> None:
    """Tells its control port and where it listens, then computes one prompt for the handoff that it is told.

    Ends with the next line.
    """
    worker, source = role(**addresses), caches()
    for layer in source.values():
        layer[:] = 7
    worker.register(source)
    engine = Engine(engine_config(tiny_model(), **addresses))
    engine.role.set_workers({(0, 0): worker.handshake()})
    say(engine.role.address)
    say(" ".join(listening()))
    request = engine.add(prompt(LENGTH), max_tokens=1, params=produce(sys.stdin.readline().strip()))
    while not select.select([sys.stdin], [], [], 0.005)[0]:
        output = engine.scheduler.schedule()
        metadata = output.kv_connector_metadata
        worker.prepare_step(metadata)
        worker.begin_step(metadata)
        worker.end_forward()
        sent, _ = worker.finished()
        engine.end(output, finished_sending=sent or None)
        if request.request_id in sent:
            say(f"acknowledged, {engine.num_free_blocks} blocks are free")
    worker.close()
    engine.close()


if __name__ == "__main__":
    main(*sys.argv[2:])
