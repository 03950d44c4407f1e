"""Worker roles in two processes on one GPU: the producer's KV arrives bit by bit, in any order of events."""

import gc
import itertools
import multiprocessing
import secrets
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess as Process
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvpipe.vllm.device import CudaOrder, HostOrder  # noqa: E402 - the package needs torch
from kvpipe.vllm.handoff.metadata import Load, LoadOutcome, StepMetadata  # noqa: E402
from tests.gpu.model import BLOCKS, LAYERS, PAUSE_CYCLES, Instance  # noqa: E402
from tests.gpu.producer import run  # noqa: E402

pytestmark = pytest.mark.gpu

TIMEOUT_S = 10
START_TIMEOUT_S = 90
FORMS = ["together", "inside", "apart", "together with checksum"]
SOURCE, TARGET = [9, 3, 4, 5, 40, 41, 0, 63], [1, 2, 3, 4, 60, 7, 8, 9]
UNTOUCHED = 0x1234
_SEEDS = itertools.count(1)


class Pair:
    """A producer in another process, and a consumer here."""

    def __init__(self, form: str, process: Process, commands: Connection) -> None:
        self._process, self._commands = process, commands
        self.has_checksums = form.endswith("checksum")
        self.consumer = Instance(form)
        self._rank = self._receive(START_TIMEOUT_S)
        # Afterwards the consumer has opened the producer's memory.
        self.handoff = self.new()
        self.prefill("eager", next(_SEEDS), SOURCE)
        self.load(TARGET)
        assert self.outcome().is_loaded

    def new(self) -> bytes:
        self.handoff = secrets.token_bytes(16)
        return self.handoff

    def _receive(self, timeout_s: float = TIMEOUT_S) -> Any:
        assert self._commands.poll(timeout_s), f"the producer does not answer; it exited with {self._process.exitcode}"
        return self._commands.recv()

    def tell(self, *command: Any) -> None:
        self._commands.send(command)
        assert self._receive() == "launched"

    def prefill(self, how: str, seed: int, block_ids: list[int]) -> None:
        self.tell("prefill", how, self.handoff, seed, block_ids)

    def load(self, block_ids: list[int]) -> None:
        load = Load("consuming", self.handoff, [(0, block_ids)], [self._rank], has_state=True)
        self.consumer.worker.begin_step(StepMetadata(loads=[load]))

    def outcome(self) -> LoadOutcome:
        worker, deadline = self.consumer.worker, time.monotonic() + TIMEOUT_S
        while not worker.finished()[1]:
            assert time.monotonic() < deadline, "the load has not ended"
            time.sleep(0.0005)
        reports = worker.drain_outcomes()
        assert reports is not None
        return reports.outcomes["consuming"]

    def close(self) -> None:
        self.consumer.worker.close()
        self._commands.send(None)
        self._process.join(TIMEOUT_S)
        assert self._process.exitcode == 0


@pytest.fixture(scope="module")
def producers() -> Iterator[dict[str, tuple[Process, Connection]]]:
    """A producer for each form of caches; they start side by side."""
    context, producers = multiprocessing.get_context("spawn"), {}
    for form in FORMS:
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(form, theirs), daemon=True)
        process.start()
        producers[form] = process, ours
    yield producers
    for process, _ in producers.values():
        process.kill()
        process.join()


@pytest.fixture(scope="module", autouse=True)
def stream() -> Iterator[None]:
    """A stream of the consumer's own: vLLM leaves the default one."""
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


@pytest.fixture(scope="module", params=FORMS)
def form_pair(
    request: pytest.FixtureRequest, producers: dict[str, tuple[Process, Connection]], stream: None
) -> Iterator[Pair]:
    pair = Pair(request.param, *producers[request.param])
    yield pair
    pair.close()


@pytest.fixture
def pair(form_pair: Pair) -> Pair:
    """A pair whose caches hold nothing of an earlier test, and a new handoff."""
    form_pair.tell("fill", 0x77)
    form_pair.consumer.fill(UNTOUCHED)
    form_pair.consumer.worker._order = form_pair.consumer.order
    form_pair.new()
    return form_pair


def others_untouched(pair: Pair) -> bool:
    others = torch.tensor([block for block in range(BLOCKS) if block not in TARGET], device="cuda:0")
    return all(bool((blocks[others] == UNTOUCHED).all()) for blocks in pair.consumer.blocks)


@pytest.mark.parametrize("is_early", [True, False], ids=["load first", "prefill first"])
@pytest.mark.parametrize("how", ["eager", "full graph", "piecewise graphs", "cached"])
def test_kv_that_the_gpu_computes_late_arrives_bit_by_bit(pair: Pair, how: str, *, is_early: bool) -> None:
    seed = next(_SEEDS)
    if is_early:
        pair.load(TARGET)
    pair.prefill(how, seed, SOURCE)
    if not is_early:
        pair.load(TARGET)
    facts = pair.outcome()
    assert (facts.is_loaded, facts.num_received, facts.reason) == (True, len(TARGET), "")
    assert facts.transport == "cuda_ipc"
    assert (facts.num_compared == 0) != pair.has_checksums
    assert (facts.num_validated == 0) == pair.has_checksums
    assert facts.num_compared + facts.num_validated >= LAYERS * len(TARGET)
    assert pair.consumer.has(seed, TARGET) == [True] * LAYERS
    assert others_untouched(pair)


def test_without_events_the_same_load_brings_wrong_kv(pair: Pair) -> None:
    """Proves that the test above can fail."""
    seed = next(_SEEDS)
    pair.load(TARGET)
    pair.prefill("without events", seed, SOURCE)
    # With checksums a block that changes after its digest is found.
    assert pair.outcome().is_loaded or pair.has_checksums
    assert pair.consumer.has(seed, TARGET) != [True] * LAYERS


def launch_earlier_step(pair: Pair) -> list[torch.Tensor]:
    """Launches a late read of the destination blocks, then a write into them. Returns the bytes that it reads."""
    at = torch.tensor(TARGET, device="cuda:0")
    for _ in range(5):
        torch.cuda._sleep(PAUSE_CYCLES)
    seen = [blocks.index_select(0, at) for blocks in pair.consumer.blocks]
    for blocks in pair.consumer.blocks:
        blocks.index_fill_(0, at, -1)
    return seen


@pytest.mark.parametrize("has_event", [True, False], ids=["event", "without event"])
def test_a_load_waits_for_earlier_steps_that_use_its_blocks_and_without_an_event_does_not(
    pair: Pair, *, has_event: bool
) -> None:
    seed = next(_SEEDS)
    pair.prefill("eager", seed, SOURCE)
    pair.tell("synchronize")
    if not has_event:
        pair.consumer.worker._order = HostOrder()
    seen = launch_earlier_step(pair)
    pair.load(TARGET)
    assert pair.outcome().is_loaded
    torch.cuda.synchronize()
    is_unseen = all(bool((each == UNTOUCHED).all()) for each in seen)
    is_kept = pair.consumer.has(seed, TARGET) == [True] * LAYERS
    assert (is_unseen and is_kept) == has_event


def test_a_handoff_that_ends_while_the_gpu_computes_brings_nothing(pair: Pair) -> None:
    pair.load(TARGET)
    pair.prefill("full graph", next(_SEEDS), SOURCE)
    pair.tell("end", pair.handoff, "preempted")
    facts = pair.outcome()
    assert (facts.is_loaded, facts.reason) == (False, "preempted")
    assert pair.consumer.worker.drain_invalid_block_ids() == set(TARGET)
    pair.tell("synchronize")
    assert all(bool((blocks == UNTOUCHED).all()) for blocks in pair.consumer.blocks)


def test_prompts_one_after_the_other_arrive_each_with_its_own_kv(pair: Pair) -> None:
    for number in range(3):
        seed, shift = next(_SEEDS), 8 * number
        target = [(block + shift) % BLOCKS for block in TARGET]
        pair.new()
        pair.prefill("eager", seed, [(block + shift) % BLOCKS for block in SOURCE])
        pair.load(target)
        assert pair.outcome().is_loaded
        assert pair.consumer.has(seed, target) == [True] * LAYERS


def test_what_is_launched_into_a_graph_is_known_to_be_captured() -> None:
    order, graph, tensor = CudaOrder(0), torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda:0")
    assert not order.is_capturing()
    with torch.cuda.graph(graph):
        tensor += 1
        is_capturing = order.is_capturing()
    assert is_capturing
    order.record().wait()


def names_of_threads() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]


def test_a_closed_worker_lets_go_of_its_memory_and_ends_its_threads() -> None:
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    num_before = names_of_threads().count("kvpipe-events")
    instance = Instance("together")
    load = Load("consuming", secrets.token_bytes(16), [(0, [1])], [("127.0.0.1:1", bytes(16))], has_state=True)
    instance.worker.begin_step(StepMetadata(loads=[load]))
    assert torch.cuda.memory_allocated() > before
    instance.worker.close()
    assert names_of_threads().count("kvpipe-events") == num_before
    del instance
    gc.collect()
    assert torch.cuda.memory_allocated() == before
