"""An instance for `kvpipe doctor`, without an engine: a control port, an agent, and an API whose handoffs move a block.

As a program, `python -m tests.doctor_instance ROLE [refuse | stop]`, it prints its URL and its control port as `kvpipe
doctor` takes them, and ends with its stdin. `refuse` has the kernel refuse its `process_vm_readv`, as profiles of
containers do.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import platform
import signal
import struct
import sys

import numpy as np
from aiohttp import web

from kvpipe import _kvpipe
from kvpipe._machine import machine
from kvpipe._transport import transport
from kvpipe.transfer_params import parse
from kvpipe.work import Work

FINGERPRINT = {"model": "tiny", "dtype": "torch.float32", "block size": "16"}
BLOCK_BYTES = 4096


class DoctorInstance:
    """Both ports of an instance.

    Args:
        role: vLLM's `kv_role`.
        token: Its shared secret.
        fingerprint: Fields in place of those of `FINGERPRINT`.
        description: Keys in place of those of its description.

    Attributes:
        control: Its control port.
        agent: Its only worker's agent.
        result: Keys in place of those of the results of its handoffs.
        api: Its API, where `serve` has started it.
        api_key: Its API wants this key.
        headers: Headers of the answers of its API.
        bodies: Requests that its API got.
        status: The status of its answers to these; None: it does not answer.
        body: The body of these answers, in place of what is right.
    """

    def __init__(self, role, *, token=b"", fingerprint=(), **description):
        fields = FINGERPRINT | dict(fingerprint)
        self.control = _kvpipe.Control("127.0.0.1:0", token, role, list(fields.items()))
        self.agent = _kvpipe.Agent("127.0.0.1:0", token, transport(), role)
        if role != "kv_producer":
            self.control.allow_checks([], [])
        described = {
            "engine_id": role,
            "role": role,
            "ranks": [self.agent.address],
            "fingerprint": fields,
            "max_model_len": 4096,
            "data_parallel_rank": None,
            "address": self.control.address,
            "versions": {"kvpipe": "0.1.0", "vllm": "0.32.0"},
            "prefix_hash_seed": None,
            "machines": [machine()],
        }
        self.control.describe_as(json.dumps(described | description))
        self.api_key = ""
        self.result, self.headers, self.bodies, self.status, self.body = {}, {}, [], 200, b""
        memory = np.zeros(BLOCK_BYTES, np.uint8)
        self._regions = [
            Work(self.agent.register("kv", memory, BLOCK_BYTES, BLOCK_BYTES), lambda region: region).wait()
        ]

    @property
    def address(self):
        """Its control port."""
        return self.control.address

    @contextlib.asynccontextmanager
    async def serve(self, ssl_context=None):
        """Serves its API, and yields it with the control port, as an argument of `kvpipe doctor`."""
        app = web.Application(middlewares=[self._check_key])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=ssl_context).start()
        scheme = "http" if ssl_context is None else "https"
        yield f"{scheme}://127.0.0.1:{runner.addresses[0][1]},{self.address}"
        await runner.cleanup()

    @web.middleware
    async def _check_key(self, request, handler):
        if self.api_key and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    async def _models(self, _):
        return web.json_response({"data": [{"id": "tiny"}]}, headers=self.headers)

    async def _complete(self, request):
        body = await request.json()
        self.bodies.append(body)
        params = body["kv_transfer_params"]
        if self.status is None:
            await asyncio.Event().wait()
        if self.status != 200 or self.body:
            return web.Response(status=self.status, body=self.body or b"it failed")
        handoff = parse(params).handoff
        if params.get("do_remote_decode"):
            self.agent.mark_ready(_kvpipe.ReadyBlocks([(handoff, 0, [0])]), self._regions)
            host, _, port = self.address.rpartition(":")
            address = {"remote_request_id": handoff.hex(), "remote_host": host, "remote_port": int(port)}
            worker = {"worker": [self.agent.address, bytes(self.agent.incarnation).hex()]}
            return web.json_response({"kv_transfer_params": {"do_remote_prefill": True} | address | worker})
        result = {"handoff": handoff.hex()} | await self._load(handoff, *params["worker"]) | self.result
        self.control.set_result(handoff, json.dumps(result))
        return web.json_response({"choices": []})

    async def _load(self, handoff, address, incarnation):
        """Loads the block of a producer's worker, and returns the result of the handoff."""
        self.agent.load(handoff, address, bytes.fromhex(incarnation), [(self._regions, 0, [0])], is_committed=True)
        while not (ended := [event for event in self.agent.drain() if event["event"].startswith("load_")]):  # noqa: ASYNC110 - as an engine, once a step
            await asyncio.sleep(0.001)
        known = ("transport", "transport_reason")
        return {key: ended[0][key] for key in known} | {
            "result": "full" if ended[0]["event"] == "load_completed" else "missing",
            "reason": ended[0].get("reason", ""),
            "bytes": ended[0]["num_bytes"],
            "transfer_ms": ended[0]["elapsed_s"] * 1000,
        }

    def close(self):
        """Closes both ports."""
        self.control.close()
        self.agent.close()


def refuse_process_vm_readv():
    """Has the kernel answer `process_vm_readv` with EPERM in this process from now on, by a seccomp filter."""
    architecture, number = {"x86_64": (0xC000003E, 310), "aarch64": (0xC00000B7, 270)}[platform.machine()]
    load, is_equal, end = 0x20, 0x15, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | 1
    filters = [
        (load, 0, 0, 4),
        (is_equal, 0, 3, architecture),
        (load, 0, 0, 0),
        (is_equal, 0, 1, number),
        (end, 0, 0, refuse),
        (end, 0, 0, allow),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in filters))
    header = struct.pack("HxxxxxxP", len(filters), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    no_new_privileges, set_seccomp, filter_mode = 38, 22, 2
    for call in ((no_new_privileges, 1, 0, 0, 0), (set_seccomp, filter_mode, header, 0, 0)):
        if libc.prctl(*call) != 0:
            raise OSError(ctypes.get_errno(), "prctl")


async def main(role, *how):
    """The program."""
    if "refuse" in how:
        refuse_process_vm_readv()
    instance = DoctorInstance(role)
    async with instance.serve() as address:
        print(address, flush=True)
        if "stop" in how:
            os.kill(os.getpid(), signal.SIGSTOP)
        await asyncio.to_thread(sys.stdin.read)
    instance.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
