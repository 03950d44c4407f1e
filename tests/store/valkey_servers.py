"""Redis and Valkey servers that tests start: one, with a password, with TLS, and a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

redis = pytest.importorskip("redis", reason="redis-py is not installed: pip install 'kvpipe[valkey]'")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SERVER = shutil.which("valkey-server") or shutil.which("redis-server")
NUM_SLOTS = 16384
STARTS_S = 20.0

needs_server = pytest.mark.skipif(
    SERVER is None, reason="neither valkey-server nor redis-server was found: apt-get install redis-server"
)


class Server:
    """A server process on a free port of loopback."""

    def __init__(self, folder: Path, *arguments: str, tls: bool = False, port: int | None = None) -> None:
        self.port = port or free_port()
        self.folder = folder
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        command = [SERVER, *ports, "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "no"]
        with (folder / f"{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen([*command, *arguments], stdout=log, stderr=subprocess.STDOUT)

    def url(self, query: str = "", login: str = "", scheme: str = "redis", database: int = 0) -> str:
        return f"{scheme}://{login}127.0.0.1:{self.port}/{database}?{query}"

    def client(self, **options) -> redis.Redis:
        return redis.Redis("127.0.0.1", self.port, **options)

    def wait(self, **options) -> None:
        """Waits until the server answers, if only that it wants a password."""
        ends_s = time.monotonic() + STARTS_S
        with self.client(**options) as client:
            while True:
                try:
                    client.ping()
                except redis.exceptions.AuthenticationError:
                    return
                except redis.exceptions.ConnectionError:
                    assert self.process.poll() is None, (self.folder / f"{self.port}.log").read_text()
                    assert time.monotonic() < ends_s, "the server has not started"
                    time.sleep(0.02)
                else:
                    return

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(folder: Path, *arguments: str, tls: bool = False, port: int | None = None, **options) -> Iterator[Server]:
    server = Server(folder, *arguments, tls=tls, port=port)
    try:
        server.wait(**options)
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def running_cluster(folder: Path, num_servers: int = 3) -> Iterator[list[Server]]:
    """Servers without replicas that share the slots."""
    with contextlib.ExitStack() as started:
        servers = []
        for _ in range(num_servers):
            port = free_port()
            options = ("--cluster-enabled", "yes", "--cluster-config-file", f"nodes-{port}.conf")
            servers.append(started.enter_context(running(folder, *options, port=port)))
        clients = [started.enter_context(server.client()) for server in servers]
        share = -(-NUM_SLOTS // num_servers)
        for index, client in enumerate(clients):
            last = min((index + 1) * share, NUM_SLOTS) - 1
            client.execute_command("CLUSTER", "ADDSLOTS", *range(index * share, last + 1))
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", servers[0].port)
        ends_s = time.monotonic() + STARTS_S
        while not all(_knows_all(client, num_servers) for client in clients):
            assert time.monotonic() < ends_s, "the cluster has not formed"
            time.sleep(0.05)
        yield servers


def _knows_all(client: redis.Redis, num_servers: int) -> bool:
    info = client.execute_command("CLUSTER", "INFO")
    return b"cluster_state:ok" in info and b"cluster_known_nodes:%d\r" % num_servers in info


def free_port() -> int:
    """A port that is free, also 10,000 above it: a cluster's servers talk there."""
    while True:
        with socket.socket() as probe, socket.socket() as bus:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
            if port > 55_000:
                continue
            with contextlib.suppress(OSError):
                bus.bind(("127.0.0.1", port + 10_000))
                return port


def certificates(folder: Path) -> tuple[str, str, str]:
    """An authority of our own: its certificate, and certificate and key of a server at 127.0.0.1."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl was not found, which makes the certificates")
    names = ca, ca_key, cert, key = [str(folder / name) for name in ("ca.pem", "ca.key", "cert.pem", "key.pem")]
    new = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run(
        [*new, "-subj", "/CN=test authority", "-keyout", ca_key, "-out", ca], check=True, capture_output=True
    )
    request = [*new, "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    extensions = ["-addext", "basicConstraints=critical,CA:FALSE", "-addext", "authorityKeyIdentifier=keyid"]
    subprocess.run([*request, *extensions, "-CA", ca, "-CAkey", ca_key], check=True, capture_output=True)
    assert all(map(os.path.exists, names))
    return ca, cert, key
