"""An engine of the checker in a process of its own: `python -m tests.chaos.engine SETTINGS`.

It reads a command a line from stdin, and writes an answer a line: JSON both. vLLM's scheduler and both roles of the
connector are real. Its model computes each slot from the slot before it, so that KV of another prompt changes the
answer, and every step compares the KV of its requests with what it has to be.
"""

import json
import os
import select
import sys

# stdout is for the answers.
os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS
from tests.faults.rounds import Holdings
from tests.vllm.handoff.computing_engine import LAYERS, HandoffEngine
from tests.vllm.store.engine import Engine, store_config

CHUNK_BYTES = 1 << 16


class StoreEngine(Engine):
    """An engine with KVStoreConnector."""

    def __init__(self, model, *, store, **settings):
        super().__init__(model, "", config=store_config(model, store, **settings), layers=LAYERS)

    num_leased = 0
    address = ""

    @property
    def results(self):
        counted = self.stats.get("first_tokens", {})
        num_exact = counted.get("none", 0)
        return {"stored_exact": num_exact, "stored_sampled": sum(counted.values()) - num_exact}


class Program:
    """Commands in, answers out, and steps between them."""

    def __init__(self, engine):
        self._engine = engine
        self._unread = b""
        self._requests = {}
        self._is_looked_at = False

    def run(self):
        """Runs until stdin ends."""
        while self._read():
            engine = self._engine
            engine.step()
            for name, request in list(self._requests.items()):
                if request.is_finished():
                    del self._requests[name]
                    say(ended=name, tokens=engine.answers.pop(request.request_id, []), results=engine.results)
            if self._is_looked_at and not engine.scheduler.requests and not engine.num_leased:
                self._is_looked_at = False
                self._say_holdings()

    def _say_holdings(self):
        engine, held = self._engine, Holdings.now()
        say(
            looked=True,
            lost_blocks=engine.num_blocks - 1 - engine.num_free_blocks,
            results=engine.results,
            descriptors=held.num_descriptors,
            threads=held.num_threads,
            bytes=held.num_bytes,
        )

    def _read(self):
        """Reads the commands that have come. Without a request it waits for one."""
        is_busy = self._is_looked_at or self._engine.scheduler.requests or self._engine.scheduler.finished_req_ids
        while select.select([0], [], [], 0 if is_busy else None)[0]:
            chunk = os.read(0, CHUNK_BYTES)
            if not chunk:
                return False
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            for line in lines:
                self._do(**json.loads(line))
            is_busy = True
        return True

    def _do(self, *, look=False, name="", abort=False, **request):
        if look:
            self._is_looked_at = True
        elif not abort:
            self._requests[name] = self._engine.add(**request)
        elif name in self._requests:
            self._engine.abort(self._requests[name])


def say(**answer):
    print(json.dumps(answer), flush=True)


def main():
    settings = json.loads(sys.argv[1])
    offset = settings.pop("sampled_offset", 0)
    PENDING_FIRST_TOKENS.has_processor = True
    engine = (StoreEngine if "store" in settings else HandoffEngine)(**settings)
    engine.sampled_offset = offset
    say(address=engine.address)
    Program(engine).run()
    engine.close()


if __name__ == "__main__":
    main()
