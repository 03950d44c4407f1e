"""What became of a handoff, asked of those who may know."""

import asyncio
from typing import Any

from kvpipe.exceptions import KVPipeError
from kvpipe.proxy.control import Control
from kvpipe.proxy.handoffs import RecentHandoffs


class Results:
    """Asks the control ports of the instances that a handoff ran on, D's first.

    Args:
        control: control ports.
        recent: which instances these are.
        timeout_s: for one of them.
    """

    def __init__(self, control: Control, recent: RecentHandoffs, timeout_s: float) -> None:
        self._control = control
        self._recent = recent
        self._timeout_s = timeout_s

    async def ask(self, handoff: str) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """The first result that is told, and who could not be asked before that, with the reason."""
        failures = {}
        for address in self._recent.addresses(handoff):
            try:
                async with asyncio.timeout(self._timeout_s):
                    result = await self._control.result(address, handoff, self._timeout_s)
            except (KVPipeError, OSError) as error:
                failures[address] = str(error) or type(error).__name__
            else:
                if result is not None:
                    return result, failures
        return None, failures
