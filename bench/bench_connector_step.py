"""What the connector's hooks cost in a step of vLLM: `python -m bench.bench_connector_step`.

vLLM's scheduler is real, and so are both roles of the connector, in one process. No model runs: the worker's hooks are
called in the order in which vLLM 0.32's V1 model runner calls them.

**Alone** are the hooks of one step, called again and again. **In a step** they come after vLLM's scheduler, which has
filled the processor's caches with its own requests. The baseline is a connector whose hooks do nothing.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from bench import machine
from bench.instances.model import write_model
from bench.report import markdown
from kvpipe import _kvpipe
from kvpipe.connector import KVPipeConnector
from kvpipe.transfer_params import consume, produce
from kvpipe.vllm.prompt_hash import prompt_hash
from tests.vllm.handoff.engine import BLOCK, SAMPLING, SHAPE, Engine, engine_config, new_id

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

SCHEDULER_HOOKS = (
    *("get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "get_kv_connector_stats"),
)
NUM_LAYERS = 32
NUM_STEPS, NUM_WARM_UP, NUM_CALLS = 100, 10, 3000
NUM_BLOCKS = 16_000
WINDOW = 4 * BLOCK
NUM_OURS = 20
# The tokens of a prompt that a step computes, where prompts are computed.
CHUNK = 2 * BLOCK
MAX_TOKENS = 1000


class EmptyConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector whose hooks do nothing, for both roles."""

    def get_num_new_matched_tokens(self, *_: Any) -> tuple[int, bool]:
        """Provides no tokens."""
        return 0, False

    def build_connector_meta(self, *_: Any) -> KVConnectorMetadata:
        """Returns empty metadata."""
        return EmptyMetadata()

    def update_state_after_alloc(self, *_: Any) -> None:
        """Does nothing."""

    def start_load_kv(self, *_: Any) -> None:
        """Does nothing."""

    def wait_for_layer_load(self, *_: Any) -> None:
        """Does nothing."""

    def save_kv_layer(self, *_: Any) -> None:
        """Does nothing."""

    def wait_for_save(self) -> None:
        """Does nothing."""

    def request_finished_all_groups(self, *_: Any) -> tuple[bool, None]:
        """Holds no block."""
        return False, None


class EmptyMetadata(KVConnectorMetadata):
    """Metadata of a connector that does nothing."""


class Bench:
    """An engine whose requests run on, and the time of its connector's hooks in each step.

    Args:
        config: Settings of the engine.
        connector: Class of the connector whose hooks are timed.
        num_groups: KV cache groups: one of full attention, and others of sliding windows.
    """

    def __init__(self, config: Any, connector: type[KVConnectorBase_V1] = KVPipeConnector, num_groups: int = 1) -> None:
        specs = [FullAttentionSpec(**SHAPE), *[SlidingWindowSpec(**SHAPE, sliding_window=WINDOW)] * (num_groups - 1)]
        self.layers = [f"layer.{index}" for index in range(NUM_LAYERS)]
        groups = [KVCacheGroupSpec(self.layers[index::num_groups], spec) for index, spec in enumerate(specs)]
        num_blocks = NUM_BLOCKS * num_groups
        cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        self.engine = Engine(config, num_blocks, specs)
        self.scheduler = self.engine.scheduler
        self.worker = connector(config, KVConnectorRole.WORKER, cache)
        self.worker.register_kv_caches({name: torch.zeros(num_blocks, 16) for name in self.layers})
        if connector is KVPipeConnector:
            self.scheduler.connector.set_xfer_handshake_metadata({0: self.worker.get_handshake_metadata()})
        else:
            self.scheduler.connector.shutdown()
            self.scheduler.connector = connector(config, KVConnectorRole.SCHEDULER, cache)
        self.seconds: list[list[float]] = []
        self._numbers = itertools.count()
        for hook in SCHEDULER_HOOKS:
            setattr(self.scheduler.connector, hook, self._timed(getattr(self.scheduler.connector, hook)))

    def _timed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            answer = hook(*arguments)
            self.seconds[-1][0] += time.perf_counter() - began_s
            return answer

        return timed

    def add(self, num_tokens: int, max_tokens: int = MAX_TOKENS, params: dict[str, Any] | None = None) -> Request:
        """Adds a request whose prompt begins as no other."""
        return self.engine.add([10 + next(self._numbers)] * num_tokens, max_tokens, params)

    def step(self) -> SchedulerOutput:
        """One step."""
        self.seconds.append([0.0, 0.0, 0.0])
        output = self.scheduler.schedule()
        began_s = time.perf_counter()
        metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata, pickle.HIGHEST_PROTOCOL))  # noqa: S301 - ours
        pickled_s = time.perf_counter()
        report = self._work(output, metadata)
        self.seconds[-1][1:] = [time.perf_counter() - pickled_s, pickled_s - began_s]
        sampled = [self._sample(request_id) for request_id in output.num_scheduled_tokens]
        result = ModelRunnerOutput(
            req_ids=list(output.num_scheduled_tokens),
            req_id_to_index={request_id: index for index, request_id in enumerate(output.num_scheduled_tokens)},
            sampled_token_ids=sampled,
            kv_connector_output=report,
        )
        self.scheduler.update_from_output(output, result)
        return output

    def _sample(self, request_id: str) -> list[int]:
        request = self.scheduler.requests[request_id]
        return [7] if request.num_computed_tokens >= request.num_tokens else []

    def _work(self, output: SchedulerOutput, metadata: Any) -> KVConnectorOutput:
        worker, report = self.worker, KVConnectorOutput()
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        for layer in self.layers:
            worker.wait_for_layer_load(layer)
            worker.save_kv_layer(layer, None, None)
        worker.start_load_kv(None)
        worker.wait_for_save()
        report.finished_sending, report.finished_recving = worker.get_finished(output.finished_req_ids)
        report.invalid_block_ids = worker.get_block_ids_with_load_errors()
        report.kv_connector_stats = worker.get_kv_connector_stats()
        report.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return report

    def measure(self, num_running: int) -> list[float]:
        """Steps, and returns microseconds: both roles, their 90th percentile, each role, and pickling the metadata."""
        for _ in range(NUM_WARM_UP):
            self.step()
        self.seconds.clear()
        for _ in range(NUM_STEPS):
            if len(self.step().num_scheduled_tokens) != num_running:
                message = "a step has other requests than are to be measured"
                raise RuntimeError(message)
        both = [scheduler + worker for scheduler, worker, _ in self.seconds]
        parts = [statistics.median(part) for part in zip(*self.seconds, strict=True)]
        return [1e6 * each for each in (statistics.median(both), statistics.quantiles(both, n=10)[-1], *parts)]

    def measure_alone(self) -> float:
        """Calls the hooks of a step again and again, and returns microseconds of both roles."""
        output, connector = self.step(), self.scheduler.connector
        seconds = []
        for _ in range(NUM_CALLS):
            began_s = time.perf_counter()
            report = self._work(output, connector.build_connector_meta(output))
            connector.update_connector_output(report)
            connector.get_kv_connector_stats()
            seconds.append(time.perf_counter() - began_s)
        return 1e6 * statistics.median(seconds)

    def close(self) -> None:
        """Ends both roles."""
        self.engine.finish_all()
        self.worker.shutdown()
        self.engine.close()


def add_requests(bench: Bench, producer: _kvpipe.Control, kinds: dict[str, int]) -> None:
    """Adds requests of each kind, and steps until all that decode have an output.

    Kinds: `other`, which takes part in no handoff; `decoding`, whose KV was to be loaded and is not, which leaves the
    same behind; `waiting`, whose producer has not begun; `producing`, whose prompt takes all steps.
    """
    decoding = [bench.add(BLOCK) for _ in range(kinds.get("other", 0))]
    for _ in range(kinds.get("decoding", 0)):
        handoff = new_id()
        request = bench.add(BLOCK, params=consume(handoff, str(producer.address)))
        producer.open(bytes.fromhex(handoff), prompt_hash(request), BLOCK, [("127.0.0.1:1", bytes(16))])
        producer.finish(bytes.fromhex(handoff), [7], "length", 0, SAMPLING.hash(request))
        decoding.append(request)
    while any(request.num_output_tokens == 0 for request in decoding):
        bench.step()
    for _ in range(kinds.get("waiting", 0)):
        bench.add(BLOCK, params=consume(new_id(), str(producer.address)))
    for _ in range(kinds.get("producing", 0)):
        bench.add(CHUNK * (NUM_WARM_UP + NUM_STEPS + 2), 1, produce(new_id()))


def row(
    folder: str, kinds: dict[str, int], num_groups: int, connector: type[KVConnectorBase_V1] = KVPipeConnector
) -> list[str]:
    """Measures steps in which all these requests run, with an engine of their own."""
    num_running = sum(kinds.values()) - kinds.get("waiting", 0)
    arguments = {
        "max_model_len": CHUNK * (NUM_WARM_UP + NUM_STEPS + 4),
        "max_num_seqs": sum(kinds.values()),
        "max_num_batched_tokens": num_running + NUM_OURS * CHUNK,
        "long_prefill_token_threshold": CHUNK,
    }
    producer = _kvpipe.Control("127.0.0.1:0", b"", "producer")
    config = engine_config(folder, arguments, handoff_timeout_s=600, open_timeout_s=600)
    bench = Bench(config, connector, num_groups)
    add_requests(bench, producer, kinds)
    figures = bench.measure(num_running)
    # Others go on with each call.
    alone = "" if {"waiting", "producing"} & kinds.keys() else f"{bench.measure_alone():.0f}"
    bench.close()
    producer.close()
    name = ", ".join(f"{num} {kind}" for kind, num in kinds.items())
    name += ", empty hooks" if connector is EmptyConnector else ""
    return [name, alone, *(f"{figure:.0f}" for figure in figures)]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=1000, help="requests that take part in no handoff")
    parser.add_argument("--groups", type=int, default=1, help="KV cache groups: full attention, then sliding windows")
    arguments = parser.parse_args()
    others, groups = arguments.running, arguments.groups
    kinds = [{"other": 1}, {"other": others}]
    kinds += [{"other": num, kind: NUM_OURS} for kind in ("decoding", "waiting", "producing") for num in (1, others)]
    kinds += [{"decoding": others}]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), num_layers=1)
        rows = [row(folder, {"other": others}, groups, EmptyConnector), *(row(folder, each, groups) for each in kinds)]
    print(markdown(["requests", "alone", "in a step", "p90", "scheduler role", "worker role", "pickle"], rows))
    print(f"us a step, medians of {NUM_STEPS} steps; load average {machine.load_average():.1f}")


if __name__ == "__main__":
    main()
