"""Descriptions of the instances' engines, read from their control ports in the background.

A request reads the latest description and never waits for a control port.
"""

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.control import Control, FailureLog
from kvpipe.proxy.tasks import OwnedTasks

_REFRESH_S = 10.0
# While an address does not answer, and when instances fail one request after the other.
_MIN_INTERVAL_S = 1.0
# The proxy begins to serve after this time even if control ports do not answer.
_START_S = 1.0


class Descriptions:
    """The latest description of each engine, by control address; P's and D's alike.

    Args:
        control: client of control ports.
        addresses: control addresses of all instances; empty ones are left out.
        failures: log of ports that do not answer.
        timeout_s: limit for one question.
    """

    def __init__(self, control: Control, addresses: Iterable[str], failures: FailureLog, timeout_s: float) -> None:
        self._control = control
        self._failures = failures
        self._timeout_s = timeout_s
        self._wanted = {address: asyncio.Event() for address in addresses if address}
        self._known: dict[str, dict[str, Any]] = {}
        self._errors: dict[str, str] = {}
        self._tasks = OwnedTasks()

    def of(self, address: str) -> dict[str, Any] | None:
        """The latest description; None if the last question to this address failed, or none has been answered yet."""
        return self._known.get(address)

    def error(self, address: str) -> str:
        """Why the last question to this address failed; empty if it was answered."""
        return self._errors.get(address, "")

    def refresh(self, address: str) -> None:
        """Have an address asked soon, because its instance has failed."""
        if address in self._wanted:
            self._wanted[address].set()

    async def start(self) -> None:
        """Ask all addresses from now on; returns when all have answered or failed, or after a second."""
        first = [self._tasks.spawn(self._ask(address)) for address in self._wanted]
        if first:
            await asyncio.wait(first, timeout=_START_S)
        for address, asked in zip(self._wanted, first, strict=True):
            self._tasks.spawn(self._keep(address, asked))

    async def close(self) -> None:
        """Stop asking."""
        await self._tasks.close(0.0)

    async def _keep(self, address: str, first: asyncio.Task[None]) -> None:
        await asyncio.wait({first})
        wanted = self._wanted[address]
        while True:
            await asyncio.sleep(_MIN_INTERVAL_S)
            if address not in self._errors:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REFRESH_S - _MIN_INTERVAL_S):
                        await wanted.wait()
            wanted.clear()
            await self._ask(address)

    async def _ask(self, address: str) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                self._known[address] = await self._control.describe(address, self._timeout_s)
        except (KVPipeError, OSError) as error:
            reason = str(error) or type(error).__name__
            self._known.pop(address, None)
            self._errors[address] = reason
            self._failures.note("description", address, reason, asyncio.get_running_loop().time())
        else:
            self._errors.pop(address, None)
