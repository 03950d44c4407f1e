"""Connections of those who do not have the token."""

import contextlib
import socket

GARBAGE = b"GET / HTTP/1.1\r\n\r\n"


@contextlib.contextmanager
def strangers(address, count):
    """Connects so often to an address; every other one sends garbage, the others nothing. They stay until the end."""
    host, port = address.rsplit(":", 1)
    with contextlib.ExitStack() as stack:
        for number in range(count):
            stranger = stack.enter_context(socket.create_connection((host, int(port))))
            if number % 2:
                with contextlib.suppress(ConnectionError):  # it may be cut off already
                    stranger.sendall(GARBAGE)
        yield
