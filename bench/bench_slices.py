"""Handoffs between tensor parallel sizes that differ, beside equal ones: `python -m bench.bench_slices`.

Three tables: loads of slices and of whole blocks, from a producer in another process; the producer's CPU time for
announcing blocks with a checksum for each slice; and the connector's share of the scheduler's steps in the handoff of a
long prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import secrets
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np

from bench import machine
from bench.measure import size_text
from bench.processes import SubjectError, clock_s
from bench.programs.request import memory, pattern
from bench.report import cell, markdown
from bench.results import summarize
from kvpipe import _kvpipe
from kvpipe._transport import transport
from kvpipe.transfer_params import consume, produce
from kvpipe.vllm.handoff.consumer.rank_sources import rank_sources
from tests.peers import Child, say

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Of Llama 3 8B in bfloat16: 8 KV heads of 128, K and V, in blocks of 16 tokens.
NUM_LAYERS, NUM_HEADS, BLOCK_BYTES = 32, 8, 8 * 128 * 2 * 2 * 16
LAYERS = [f"layer.{index}" for index in range(NUM_LAYERS)]
LEAST_BLOCKS = 128
DATA_PATHS = ("default", "tcp")
LAYOUTS = ("contiguous", "scattered")
WITHIN_S, CHILD_WITHIN_S = 60.0, 3600.0
# A worker looks once a step. One that looked all the time would take a core from the transport.
POLL_S = 200e-6
GIB = 1 << 30
# Of the long prompt.
BLOCK_TOKENS, STEP_TOKENS = 16, 8_192
HOOKS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished_all_groups", "take_events", "get_kv_connector_stats"),
)


@dataclass(frozen=True)
class Subject:
    """A producer and a consumer.

    Attributes:
        producer: The name of the producer's ranks.
        num_theirs: Their number.
        num_ours: Ranks of the consumer.
    """

    producer: str
    num_theirs: int
    num_ours: int


WHOLE, EQUAL = "1 to 1", "4 to 4"
SUBJECTS = {
    WHOLE: Subject("undivided", 1, 1),
    EQUAL: Subject("4 ranks", 4, 4),
    "1 to 4": Subject("4 slices", 1, 4),
    "4 to 1": Subject("4 ranks", 4, 1),
}
DIVIDED = {
    "whole blocks": Subject("undivided", 1, 1),
    "4 slices": Subject("4 slices", 1, 4),
    "8 slices": Subject("8 slices", 1, 8),
}
AUDIENCES = ("no consumer", "consumers")
# Each has been asked for slices of one number, or for none: what an agent divides stays divided.
PRODUCERS = {subject.producer: subject.num_theirs for subject in (*SUBJECTS.values(), *DIVIDED.values())}


# --- agents


@dataclass
class Rank:
    """An agent with its heads of all layers, and a region for each layer."""

    agent: _kvpipe.Agent
    regions: list[_kvpipe.Region]

    @classmethod
    def of(cls, layers: Any) -> Rank:
        """Registers memory `[layers, blocks, bytes]`."""
        agent = _kvpipe.Agent("127.0.0.1:0", b"", transport())
        works = [agent.register(*each, layers.shape[2], layers.shape[2]) for each in zip(LAYERS, layers, strict=True)]
        for work in works:
            work.wait(WITHIN_S)
        return cls(agent, [work.result() for work in works])


def by_layer(data: Any, num_blocks: int) -> Any:
    """Memory of a rank as `[layers, blocks, bytes]`."""
    return data.reshape(NUM_LAYERS, num_blocks, -1)


def of_ranks(whole: Any, num_ranks: int) -> list[Any]:
    """Returns copies of each rank's heads of `[layers, blocks, bytes]`."""
    by_rank = whole.reshape(*whole.shape[:2], num_ranks, -1)
    copies = []
    for rank in range(num_ranks):
        copies.append(by_layer(memory(whole.size // num_ranks), whole.shape[1]))
        copies[-1][:] = by_rank[:, :, rank]
    return copies


def ids_of(layout: str, num_blocks: int, seed: int) -> list[int]:
    """The order of the blocks of one side."""
    if layout == "contiguous":
        return list(range(num_blocks))
    ids: list[int] = np.random.default_rng(seed).permutation(num_blocks).tolist()
    return ids


def serve(num_blocks: int) -> None:
    """The producer's process: announces blocks when a line says so."""
    whole = by_layer(pattern(NUM_LAYERS * num_blocks * BLOCK_BYTES), num_blocks)
    sources = {1: [whole], 4: of_ranks(whole, 4)}
    producers = {name: [Rank.of(each) for each in sources[number]] for name, number in PRODUCERS.items()}
    addresses = {
        name: [(rank.agent.address, rank.agent.incarnation.hex()) for rank in ranks]
        for name, ranks in producers.items()
    }
    say(json.dumps(addresses))
    for line in sys.stdin:
        name, handoff, layout, num_announced = json.loads(line)
        block_ids = ids_of(layout, num_blocks, seed=1)[:num_announced]
        for rank in producers[name]:
            if not block_ids:
                rank.agent.end(bytes.fromhex(handoff), "measured")
            else:
                ready = _kvpipe.ReadyBlocks([(bytes.fromhex(handoff), 0, block_ids)])
                for region in rank.regions:
                    rank.agent.mark_ready(ready, [region])
        say("done")


class Transfers:
    """A producer in another process, and consumers here, over one data path.

    Args:
        data_path: `default` or `tcp`.
        num_blocks: Blocks of each layer.
        targets: Memory of the consumers' ranks, by their number.
    """

    def __init__(self, data_path: str, num_blocks: int, targets: Mapping[int, list[Any]]) -> None:
        self.num_blocks, self._targets = num_blocks, targets
        with _over(data_path):
            self._child = Child("serve", num_blocks, module="bench.bench_slices", limit_s=CHILD_WITHIN_S)
            self._consumers = {number: [Rank.of(each) for each in ranks] for number, ranks in targets.items()}
        self._addresses = json.loads(self._child.read())

    @property
    def pid(self) -> int:
        """The producer's process."""
        return int(self._child.process.pid)

    def announce(self, producer: str, handoff: bytes, layout: str, num_blocks: int | None = None) -> None:
        """Announces all blocks of a handoff, or the first ones. Does not wait for their checksums."""
        self._tell(producer, handoff, layout, self.num_blocks if num_blocks is None else num_blocks)

    def end(self, producer: str, handoff: bytes) -> None:
        """Ends a handoff."""
        self._tell(producer, handoff, LAYOUTS[0], 0)

    def _tell(self, producer: str, handoff: bytes, layout: str, num_blocks: int) -> None:
        self._child.tell(json.dumps([producer, handoff.hex(), layout, num_blocks]))
        self._child.read()

    def begin_load(self, subject: Subject, handoff: bytes, layout: str, num_blocks: int | None = None) -> None:
        """Begins a load on all ranks of the consumer. The handoff can be loaded again."""
        block_ids = ids_of(layout, self.num_blocks, seed=2)[:num_blocks]
        for index, rank in enumerate(self._consumers[subject.num_ours]):
            sources = rank_sources(index, subject.num_ours, subject.num_theirs, NUM_HEADS)
            for number, source in enumerate(sources):
                address, incarnation = self._addresses[subject.producer][source.rank]
                rank.agent.load(
                    handoff,
                    address,
                    bytes.fromhex(incarnation),
                    [(rank.regions, 0, block_ids)],
                    is_committed=True,
                    rank=number,
                    destination_slice=source.destination_slice,
                    source_slice=source.source_slice,
                    is_shared=True,
                )

    def until_loaded(self, subject: Subject) -> None:
        """Waits for the end of the loads on all ranks.

        Raises:
            SubjectError: One has failed.
        """
        num_left = max(subject.num_ours, subject.num_theirs)
        ends_at = time.monotonic() + WITHIN_S
        while num_left:
            for rank in self._consumers[subject.num_ours]:
                for event in rank.agent.drain():
                    if event["event"] == "load_failed" or time.monotonic() > ends_at:
                        raise SubjectError(event.get("reason", "loads are late"))
                    num_left -= event["event"] == "load_completed"
            time.sleep(POLL_S)

    def load(self, subject: Subject, handoff: bytes, layout: str, num_blocks: int | None = None) -> None:
        """Loads a handoff on all ranks."""
        self.begin_load(subject, handoff, layout, num_blocks)
        self.until_loaded(subject)

    def verify(self, subject: Subject, layout: str, whole: Any) -> None:
        """Compares all bytes of a load with the producer's.

        Raises:
            SubjectError: They differ.
        """
        ours, theirs = (ids_of(layout, self.num_blocks, seed) for seed in (2, 1))
        by_rank = whole.reshape(*whole.shape[:2], subject.num_ours, -1)
        for rank, target in enumerate(self._targets[subject.num_ours]):
            if not np.array_equal(target[:, ours], by_rank[:, theirs, rank]):
                message = f"{subject}: rank {rank} has other bytes than were sent"
                raise SubjectError(message)
            target[:] = 0

    def close(self) -> None:
        """Ends both processes' agents."""
        for rank in itertools.chain(*self._consumers.values()):
            rank.agent.close()
        self._child.end()


@contextlib.contextmanager
def _over(data_path: str) -> Iterator[None]:
    """What is made meanwhile uses this data path."""
    before = os.environ.pop("KVPIPE_DATA_PATH", None)
    if data_path != "default":
        os.environ["KVPIPE_DATA_PATH"] = data_path
    yield
    os.environ.pop("KVPIPE_DATA_PATH", None)
    if before is not None:
        os.environ["KVPIPE_DATA_PATH"] = before


@contextlib.contextmanager
def transfers(num_blocks: int) -> Iterator[dict[str, Transfers]]:
    """The transfers of each data path, into the same memory."""
    total = NUM_LAYERS * num_blocks * BLOCK_BYTES
    numbers = {subject.num_ours for subject in (*SUBJECTS.values(), *DIVIDED.values())}
    targets = {
        number: [by_layer(memory(total // number), num_blocks) for _ in range(number)] for number in sorted(numbers)
    }
    with contextlib.ExitStack() as stack:
        found = {}
        for data_path in DATA_PATHS:
            found[data_path] = Transfers(data_path, num_blocks, targets)
            stack.callback(found[data_path].close)
        yield found


# --- loads


def measure_loads(by_path: Mapping[str, Transfers], num_rounds: int) -> dict[tuple[str, str, str], list[list[float]]]:
    """Loads each subject's handoff in turn; returns seconds and seconds of CPU, by data path, layout and subject."""
    num_blocks = by_path["default"].num_blocks
    whole = by_layer(pattern(NUM_LAYERS * num_blocks * BLOCK_BYTES), num_blocks)
    cases = list(itertools.product(by_path, LAYOUTS, SUBJECTS))
    handoffs = {}
    for data_path, layout, name in cases:
        subject, handoff = SUBJECTS[name], secrets.token_bytes(16)
        handoffs[data_path, layout, name] = handoff
        by_path[data_path].announce(subject.producer, handoff, layout)
        by_path[data_path].load(subject, handoff, layout)
        by_path[data_path].verify(subject, layout, whole)
    found: dict[tuple[str, str, str], list[list[float]]] = defaultdict(list)
    for number in range(num_rounds):
        for case in _turned(cases, number):
            data_path, layout, name = case
            pid, began_s = by_path[data_path].pid, time.perf_counter()
            cpu_s = -clock_s(pid) - time.process_time()
            by_path[data_path].load(SUBJECTS[name], handoffs[case], layout)
            took_s = time.perf_counter() - began_s
            found[case].append([took_s, cpu_s + clock_s(pid) + time.process_time()])
        print(f"loads: round {number + 1} of {num_rounds}", file=sys.stderr)
    for (data_path, _, name), handoff in handoffs.items():
        by_path[data_path].end(SUBJECTS[name].producer, handoff)
    return found


def _turned(cases: Sequence[Any], number: int) -> list[Any]:
    """The cases of a round: each is first in some round, and every other round is in reverse."""
    at = number // 2 % len(cases)
    return [*cases[at:], *cases[:at]][:: 1 if number % 2 == 0 else -1]


def table_of_loads(found: Mapping[tuple[str, str, str], list[list[float]]], num_bytes: int) -> str:
    """Bytes a second of each case, and its ratio to the two that move whole blocks."""
    rates = {case: [num_bytes / took_s / 1e9 for took_s, _ in rounds] for case, rounds in found.items()}
    rows = []
    for (data_path, layout, name), values in rates.items():
        ratios = [ratio(values, rates[data_path, layout, base]) if base != name else "" for base in (WHOLE, EQUAL)]
        cpu = summarize([cpu_s * GIB / num_bytes for _, cpu_s in found[data_path, layout, name]])
        rows.append([data_path, layout, name, cell(summarize(values)), *ratios, cell(cpu)])
    header = ["data path", "layout", "ranks", "GB/s", f"to {WHOLE}", f"to {EQUAL}", "CPU s/GiB"]
    return markdown(header, rows)


def ratio(values: Sequence[float], bases: Sequence[float]) -> str:
    """The median of the ratios of the rounds, with the 10th and 90th percentile."""
    return cell(summarize([value / base for value, base in zip(values, bases, strict=True)]))


# --- checksums


def measure_checksums(transfers: Transfers, num_rounds: int) -> dict[tuple[str, str], list[float]]:
    """Returns the producer's seconds of CPU for announcing all blocks: to no consumer, and to some that load them."""
    cases = list(itertools.product(AUDIENCES, DIVIDED))
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for number in range(num_rounds + 1):
        for audience, name in _turned(cases, number):
            took_s = _announce(transfers, DIVIDED[name], is_loaded=audience == "consumers")
            if number:  # the first round is to warm up, and divides blocks
                found[audience, name].append(took_s)
        print(f"checksums: round {number} of {num_rounds}", file=sys.stderr)
    return found


def _announce(transfers: Transfers, subject: Subject, *, is_loaded: bool) -> float:
    """Announces a handoff, and returns the producer's seconds of CPU until it has done so."""
    handoff, last, layout = secrets.token_bytes(16), secrets.token_bytes(16), LAYOUTS[1]
    before_s = clock_s(transfers.pid)
    if is_loaded:
        transfers.begin_load(subject, handoff, layout)
    transfers.announce(subject.producer, handoff, layout)
    if is_loaded:
        transfers.until_loaded(subject)
    else:
        # Announced in the order of the calls: when this block is here, all before it are announced.
        transfers.announce(subject.producer, last, layout, 1)
        transfers.load(subject, last, layout, 1)
    took_s = clock_s(transfers.pid) - before_s
    transfers.end(subject.producer, handoff)
    transfers.end(subject.producer, last)
    return took_s


def table_of_checksums(found: Mapping[tuple[str, str], list[float]], num_bytes: int) -> str:
    """CPU of each number of slices, and its ratio to that of whole blocks."""
    rows = []
    for audience, name in itertools.product(AUDIENCES, DIVIDED):
        seconds, bases = found[audience, name], found[audience, next(iter(DIVIDED))]
        per_gib = cell(summarize([each * GIB / num_bytes for each in seconds]))
        rows.append([audience, name, per_gib, ratio(seconds, bases) if seconds is not bases else ""])
    return markdown(["announced to", "checksums of", "producer's CPU s/GiB", "to whole blocks"], rows)


# --- steps


class Steps:
    """An engine's scheduler, and the CPU time of the connector's hooks in each of its steps, on the scheduler's thread.

    Args:
        folder: The model.
        num_tokens: Length of the longest prompt.
    """

    def __init__(self, folder: str, num_tokens: int) -> None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415 - the producer's process has no vLLM

        from tests.vllm.handoff.engine import SHAPE, Engine, engine_config  # noqa: PLC0415 - it imports vLLM, too

        arguments = {
            "max_model_len": num_tokens + BLOCK_TOKENS,
            "block_size": BLOCK_TOKENS,
            "max_num_batched_tokens": STEP_TOKENS,
            "hf_overrides": {"max_position_embeddings": 2 * num_tokens},
        }
        spec = FullAttentionSpec(**SHAPE | {"block_size": BLOCK_TOKENS})
        num_blocks = num_tokens // BLOCK_TOKENS + 8
        self.engine = Engine(engine_config(folder, arguments), num_blocks, [spec], BLOCK_TOKENS)
        self._hooks_s = 0.0
        connector = self.engine.scheduler.connector
        for hook in HOOKS:
            setattr(connector, hook, self._timed(getattr(connector, hook)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_s = time.thread_time()
            answer = hook(*arguments)
            self._hooks_s += time.thread_time() - began_s
            return answer

        return timed

    def timed(self, work: Callable[..., Any], *arguments: Any, **words: Any) -> tuple[Any, tuple[float, float]]:
        """Calls something, and returns its answer; seconds of the hooks meanwhile, and of all of it."""
        self._hooks_s, began_s = 0.0, time.thread_time()
        answer = work(*arguments, **words)
        return answer, (self._hooks_s, time.thread_time() - began_s)


def measure_steps(num_tokens: int, num_rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Hands over long prompts; returns seconds of CPU of the hooks, and of the whole, by what happens.

    Workers do nothing: what they would report comes from here.
    """
    from bench.instances.model import write_model  # noqa: PLC0415 - as above

    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), num_layers=1)
        producer, consumer = Steps(folder, num_tokens), Steps(folder, num_tokens)
        for number in range(num_rounds + 1):
            # The first round is to warm up.
            times = hand_over(producer, consumer, [10 + number] * num_tokens)
            for name, of_step in times if number else ():
                found[name].append(of_step)
            print(f"steps: round {number} of {num_rounds}", file=sys.stderr)
        producer.engine.close()
        consumer.engine.close()
    return found


def hand_over(producer: Steps, consumer: Steps, prompt: list[int]) -> Iterator[tuple[str, tuple[float, float]]]:
    """Hands over a prompt that decode asks for first; then prefill has it in its prefix cache, and no consumer asks."""
    from tests.vllm.handoff.engine import outcome  # noqa: PLC0415 - as above

    handoff = secrets.token_hex(16)
    prefill = producer.engine.new_request(prompt, 1, produce(handoff))
    decode = consumer.engine.new_request(prompt, 2, consume(handoff, producer.engine.role.address))
    yield "D, arrival", consumer.timed(consumer.engine.scheduler.add_request, decode)[1]
    consumer.engine.step()
    yield from produce_all(producer, prefill, "P, the first step", "P, a step")
    metadata, of_step = consumer.timed(consumer.engine.step)
    while not metadata[1].loads:
        time.sleep(POLL_S)  # the producer's messages are on their way
        metadata, of_step = consumer.timed(consumer.engine.step)
    yield "D, the load begins", of_step
    ended = {"finished_recving": {decode.request_id}, "kv_connector_worker_meta": outcome(decode)}
    yield "D, the load ends", consumer.timed(consumer.engine.step, **ended)[1]
    yield "D, its first step", consumer.timed(consumer.engine.step)[1]
    while not decode.is_finished():
        consumer.engine.step()
    again = producer.engine.new_request(prompt, 1, produce(secrets.token_hex(16)))
    yield from produce_all(producer, again, "P, all is cached", "")


def produce_all(producer: Steps, request: Any, first: str, others: str) -> Iterator[tuple[str, tuple[float, float]]]:
    """Computes a prompt, and frees its blocks as if they had been loaded."""
    yield "P, arrival", producer.timed(producer.engine.scheduler.add_request, request)[1]
    name = first
    while not request.is_finished():
        _, of_step = producer.timed(producer.engine.step)
        yield ("P, the last step" if others and request.is_finished() else name), of_step
        name = others
    producer.engine.step(finished_sending={request.request_id})


def table_of_steps(found: Mapping[str, list[tuple[float, float]]]) -> str:
    """Milliseconds of the connector's hooks, and of vLLM without them."""
    rows = []
    for name, times in found.items():
        hooks = [1e3 * hooks_s for hooks_s, _ in times]
        vllm = [1e3 * (all_s - hooks_s) for hooks_s, all_s in times]
        rows.append([name, cell(summarize(hooks)), cell(summarize(vllm)), ratio(hooks, vllm)])
    return markdown(["what happens", "hooks, CPU ms", "vLLM's scheduler without them, CPU ms", "to vLLM's"], rows)


def main() -> None:
    """Prints three tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    parser.add_argument("--blocks", type=int, help="of each layer; default: so many that no cache holds them")
    parser.add_argument("--tokens", type=int, default=131_072, help="of the long prompt; default 131072")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    layers_bytes = NUM_LAYERS * BLOCK_BYTES
    num_blocks = options.blocks or max(LEAST_BLOCKS, (machine.cache_bytes() or 0) * 5 // 4 // layers_bytes + 1)
    num_bytes, facts = num_blocks * layers_bytes, machine.machine()
    with transfers(num_blocks) as by_path:
        loads = measure_loads(by_path, options.rounds)
        checksums = measure_checksums(by_path["default"], options.rounds)
    steps = measure_steps(options.tokens, options.rounds)
    print(f"loads of {size_text(num_bytes)}\n\n{table_of_loads(loads, num_bytes)}\n")
    print(f"{table_of_checksums(checksums, num_bytes)}\n")
    print(f"a prompt of {options.tokens} tokens\n\n{table_of_steps(steps)}\n")
    before, after = facts["load_average"], machine.load_average()
    print(f"medians of {options.rounds} rounds (p10-p90); load average {before} before, {after} after")
    if options.json:
        tables = {"loads": loads, "checksums": checksums, "steps": steps}
        samples = {name: [{"case": case, "seconds": found[case]} for case in found] for name, found in tables.items()}
        options.json.write_text(json.dumps({**facts, "bytes": num_bytes, **samples}, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(int(sys.argv[2]))
    else:
        main()
