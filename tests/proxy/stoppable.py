"""Instances that are stopped (SIGSTOP): processes with HTTP and a real control port, as `instance_process.py` is."""

import asyncio
import signal
import sys
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from kvpipe import _kvpipe
from kvpipe.control import ControlClient

# Above what a busy machine takes to answer a probe.
FROZEN_AFTER_S = 2.0
# Of an engine, at its control port.
DESCRIPTION = '{"forces_first_tokens": true, "reasoning_parser": ""}'


@dataclass
class Stoppable:
    """An instance in a process of its own."""

    process: asyncio.subprocess.Process
    url: str
    control: str
    bodies: list = field(default_factory=list)

    def stop(self):
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self):
        self.process.send_signal(signal.SIGCONT)

    async def until_state(self, s, is_reached):
        """Returns its own report of handoffs, once it is so."""
        while True:
            async with s.client.get(self.url + "/state") as response:
                state = await response.json()
            if is_reached(state):
                return state
            await asyncio.sleep(0.05)

    async def answer_all(self, s):
        """Has it answer what it has got, and what it gets from now on."""
        async with s.client.post(self.url + "/go"):
            pass


@asynccontextmanager
async def stoppable():
    command = (sys.executable, "-m", "tests.proxy.instance_process")
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        url, control = (await process.stdout.readline()).decode().split()
        yield Stoppable(process, url, control)
    finally:
        process.kill()
        await process.wait()


@contextmanager
def real_control():
    """A client of control ports, and a port for the instances of the test's own process."""
    client, port = ControlClient(token=""), _kvpipe.Control("127.0.0.1:0", b"", "engine")
    port.describe_as(DESCRIPTION)
    try:
        yield client, port.address
    finally:
        client.close()
        port.close()
