"""Redis and Valkey servers that tests start: one, with a password, with TLS, and a cluster."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import redis

from kvpipe.launch.ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Of those that were found.
PROGRAMS = {name: found for name in ("redis", "valkey") if (found := shutil.which(f"{name}-server"))}
NUM_SLOTS = 16384
# A machine that stood still for 59 s let a TLS handshake of a test fail.
STARTS_S = 90.0
ANSWERS_S = 60.0


class Server:
    """A server process on a free port of loopback."""

    def __init__(
        self, program: str, folder: Path, *arguments: str, tls: Tls | None = None, port: int | None = None
    ) -> None:
        self.port = port or free_port()
        self.folder, self.tls = folder, tls
        ports = ["--port", "0", "--tls-port", str(self.port), *tls.arguments] if tls else ["--port", str(self.port)]
        command = [program, *ports, "--bind", "127.0.0.1", "--dir", str(folder), "--save", "", "--appendonly", "no"]
        with (folder / f"{self.port}.log").open("ab") as log:
            self.process = subprocess.Popen([*command, *arguments], stdout=log, stderr=subprocess.STDOUT)

    def url(self, query: str = "", login: str = "", database: int = 0) -> str:
        scheme, ca = ("valkeys", f"&ca_file={self.tls.ca}") if self.tls else ("redis", "")
        return f"{scheme}://{login}127.0.0.1:{self.port}/{database}?{query}{ca}"

    def client(self, **options) -> redis.Redis:
        times = {"socket_timeout": ANSWERS_S, "socket_connect_timeout": ANSWERS_S}
        return redis.Redis("127.0.0.1", self.port, **times, **(self.tls.options if self.tls else {}), **options)

    def wait(self) -> None:
        """Waits until the server answers, if only that it wants a password."""
        ends_s = time.monotonic() + STARTS_S
        with self.client() as client:
            while True:
                try:
                    client.ping()
                except redis.exceptions.AuthenticationError:
                    return
                except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                    self._check_is_running()
                    assert time.monotonic() < ends_s, "the server has not started"
                    time.sleep(0.02)
                else:
                    return

    def _check_is_running(self) -> None:
        log = (self.folder / f"{self.port}.log").read_text()
        if self.tls and "connection type tls" in log:
            pytest.skip("this server was built without TLS")
        assert self.process.poll() is None, log

    def stop(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(
    program: str, folder: Path, *arguments: str, tls: Tls | None = None, port: int | None = None
) -> Iterator[Server]:
    server = Server(program, folder, *arguments, tls=tls, port=port)
    try:
        server.wait()
        yield server
    finally:
        server.kill()


@contextlib.contextmanager
def running_cluster(
    program: str, folder: Path, *arguments: str, num_servers: int = 3, tls: Tls | None = None
) -> Iterator[list[Server]]:
    """Servers without replicas that share the slots; with TLS they use it among themselves, too."""
    with contextlib.ExitStack() as started:
        servers = []
        common = (*arguments, "--cluster-enabled", "yes", *(("--tls-cluster", "yes") if tls else ()))
        for _ in range(num_servers):
            port = free_port()
            own = (*common, "--cluster-config-file", f"nodes-{port}.conf")
            servers.append(started.enter_context(running(program, folder, *own, tls=tls, port=port)))
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


def num_connections(client: redis.Redis) -> int:
    """Connections that a server has accepted or refused until now."""
    stats = client.info("stats")
    return stats["total_connections_received"] + stats["rejected_connections"]


def free_port() -> int:
    """A port that is free, also 10,000 above it, where a cluster's servers talk; both below the ephemeral ports."""
    while True:
        [port] = free_ports(1)
        if port + 10_000 < 32_768:
            with socket.socket() as bus, contextlib.suppress(OSError):
                bus.bind(("127.0.0.1", port + 10_000))
                return port


class Tls(NamedTuple):
    """An authority of our own, and certificate and key of a server at 127.0.0.1."""

    ca: str
    cert: str
    key: str

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of a server, which asks clients for no certificate."""
        files = ("--tls-cert-file", self.cert, "--tls-key-file", self.key, "--tls-ca-cert-file", self.ca)
        return (*files, "--tls-auth-clients", "no")

    @property
    def options(self) -> dict[str, Any]:
        """Of redis-py."""
        return {"ssl": True, "ssl_ca_certs": self.ca}


def certificates(folder: Path) -> Tls:
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
    return Tls(ca, cert, key)
