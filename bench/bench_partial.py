"""A batch of eight requests of which some lose their KV: `python -m bench.bench_partial`.

Prefill computes the prompts of all requests, and releases the KV of some before decode asks for it. kvpipe's decode
computes what is missing of each request. A connector that drops the whole batch would compute all eight, which is the
last row.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench import machine
from bench.handoff import client
from bench.instances import model
from bench.instances.servers import ServerPool
from bench.instances.vllm import BLOCK_SIZE, TOKEN, kvpipe_transfer
from bench.report import markdown
from bench.serving.subjects import Setting
from kvpipe.control import ControlClient
from kvpipe.launch.ports import free_ports
from kvpipe.launch.spec import LOOPBACK
from kvpipe.transfer_params import consume, produce

BATCH = 8
CHUNK = 2048
LOST = (0, 1, 2, 4, 8)


class Pair:
    """A prefill and a decode instance, each with a core of its own."""

    def __init__(self, pool: ServerPool, setting: Setting) -> None:
        self._controls = [f"{LOOPBACK}:{port}" for port in free_ports(2)]
        roles = zip(("kv_producer", "kv_consumer"), self._controls, strict=True)
        self._servers = [
            setting.start(pool, role, [place], CHUNK, transfer=kvpipe_transfer(role, control))
            for place, (role, control) in enumerate(roles)
        ]
        for server in self._servers:
            server.until_healthy()
        self._control = ControlClient(TOKEN)

    def first_tokens_s(self, num_tokens: int, num_lost: int, seed: str) -> list[float]:
        """Seconds from asking decode to the first token of each request of a batch; the first ones lose their KV."""
        prompts = [model.random_prompt(num_tokens, f"{seed} {index}") for index in range(BATCH)]
        handoffs = [secrets.token_hex(16) for _ in prompts]
        with ThreadPoolExecutor(BATCH) as threads:
            list(threads.map(self._prefill, prompts, handoffs))
            for handoff in handoffs[:num_lost]:
                self._control.release(self._controls[0], handoff).wait()
            return list(threads.map(self._decode, prompts, handoffs))

    def _prefill(self, tokens: list[int], handoff: str) -> None:
        client.prefill(self._servers[0].url, tokens, kv_transfer_params=produce(handoff))

    def _decode(self, tokens: list[int], handoff: str) -> float:
        params = consume(handoff, self._controls[0])
        found = client.stream(self._servers[1].url, tokens, kv_transfer_params=params)
        return found.texts_s[0] - found.asked_s


def main() -> None:
    """Measures batches with 0 to 8 requests without KV, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="of each prompt; default 512")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--work", type=Path, default=Path(".cache/bench-partial"), help="folder for model and logs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    args = parser.parse_args()
    work = args.work.absolute()
    model.write_model(work / "model")
    num_blocks = BATCH * (args.tokens // BLOCK_SIZE + 2)
    setting = Setting(
        work=work,
        max_model_len=args.tokens + client.OUTPUT_TOKENS,
        num_blocks=num_blocks,
        prefill_chunk=CHUNK,
        decode_chunk=CHUNK,
        num_a_role=1,
    )
    found: dict[int, list[list[float]]] = {num_lost: [] for num_lost in LOST}
    with ServerPool() as pool:
        pair = Pair(pool, setting)
        pair.first_tokens_s(args.tokens, 0, "warm-up")
        for number in range(args.rounds):
            for num_lost in LOST:
                seed = f"{number} {num_lost}"
                found[num_lost].append(pair.first_tokens_s(args.tokens, num_lost, seed))
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    facts = {"tokens": args.tokens, "rounds": args.rounds, "load_average": machine.load_average()}
    print(_table(found))
    if args.json:
        args.json.write_text(json.dumps({**facts, "first_tokens_s": found}, indent=1))


def _table(found: dict[int, list[list[float]]]) -> str:
    """First-token times of the requests that kept their KV, of those that lost it, and of all, medians of rounds."""
    header = ["requests without KV", "first token, KV kept", "first token, KV lost", "mean of all 8", "last of all 8"]
    lines = []
    for num_lost, rounds in found.items():
        cells = [
            str(num_lost),
            _ms([statistics.median(times[num_lost:]) for times in rounds if times[num_lost:]]),
            _ms([statistics.median(times[:num_lost]) for times in rounds if times[:num_lost]]),
            _ms([statistics.fmean(times) for times in rounds]),
            _ms([max(times) for times in rounds]),
        ]
        lines.append(cells)
    return markdown(header, lines)


def _ms(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1000:.0f} ms" if seconds else ""


if __name__ == "__main__":
    main()
