"""A server program of another project, on a free port."""

from __future__ import annotations

import socket
import subprocess
import time
from typing import TYPE_CHECKING

from .side import Idle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ServerProgram(Idle):
    """Runs a server of this machine in a process of its own, which ends with this one.

    Args:
        host: Address to listen on.
        command: Returns the command line for a host and a port.
        within_s: Time that a start may take.
    """

    def __init__(self, host: str, command: Callable[[str, int], Sequence[str]], within_s: float) -> None:
        with socket.socket() as holder:
            holder.bind((host, 0))
            self._address: tuple[str, int] = holder.getsockname()
        self._process = subprocess.Popen(  # noqa: S603 - what the user has installed
            ["setpriv", "--pdeathsig", "KILL", *command(*self._address)],  # noqa: S607 - of util-linux
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        self._wait_for_start(within_s)

    def _wait_for_start(self, within_s: float) -> None:
        ends_at = time.monotonic() + within_s
        while True:
            try:
                socket.create_connection(self._address, timeout=1).close()
            except OSError:
                if time.monotonic() > ends_at or self._process.poll() is not None:
                    raise
                time.sleep(0.05)
            else:
                return

    def close(self) -> None:
        """Ends the server."""
        self._process.terminate()
        self._process.wait()
