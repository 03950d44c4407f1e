"""The prefill instance, in a process of its own."""

import traceback
from multiprocessing.connection import Connection

import torch

from kvpipe.vllm.device import HostOrder
from kvpipe.vllm.handoff.metadata import HandoffEnd, ReadyRange, StepMetadata
from tests.gpu.model import LAYERS, Instance


class Producer(Instance):
    """Computes prompts in the ways of vLLM's model runners."""

    def __init__(self, form: str) -> None:
        super().__init__(form)
        self._seed = torch.zeros((), dtype=torch.int64, device="cuda:0")
        self._graphs: dict[tuple[int, ...], list[torch.cuda.CUDAGraph]] = {}

    def prefill(self, how: str, handoff: bytes, seed: int, block_ids: list[int]) -> None:
        """Launches a prompt, and waits for nothing."""
        worker, ready = self.worker, [ReadyRange(handoff, 0, block_ids)]
        at = torch.tensor(block_ids, device="cuda:0")
        self._seed.fill_(seed)
        graphs = self._captured(how, block_ids, at)
        worker._order = HostOrder() if how == "without events" else self.order
        if how == "cached":
            for layer in range(LAYERS):
                self.compute(layer, self._seed, at)
            worker.begin_step(StepMetadata(cached=ready))
            worker.end_forward()
            return
        worker.begin_step(StepMetadata(ready=ready))
        for layer, name in enumerate(self.layers):
            if how == "full graph":
                if layer == 0:
                    graphs[0].replay()
                continue
            if how == "piecewise graphs":
                graphs[layer].replay()
            else:
                self.compute(layer, self._seed, at)
            worker.save_layer(name)
        worker.end_forward()

    def _captured(self, how: str, block_ids: list[int], at: torch.Tensor) -> list[torch.cuda.CUDAGraph]:
        layers = {"full graph": [range(LAYERS)], "piecewise graphs": [range(at, at + 1) for at in range(LAYERS)]}
        graphs = []
        for of_graph in layers.get(how, ()):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for layer in of_graph:
                    self.compute(layer, self._seed, at)
            graphs.append(graph)
        # A graph reads its inputs when it runs.
        self._graphs[len(self._graphs), *block_ids] = graphs
        return graphs

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def end(self, handoff: bytes, reason: str) -> None:
        self.worker.prepare_step(StepMetadata(ended=[HandoffEnd(handoff, reason)]))


def run(form: str, commands: Connection) -> None:
    """Serves the test: `(method, *arguments)` each, and answers when what it does is launched."""
    # As vLLM, which leaves the default stream.
    torch.cuda.set_stream(torch.cuda.Stream())
    producer = Producer(form)
    address = producer.worker.handshake()
    commands.send((address.address, address.incarnation))
    while (command := commands.recv()) is not None:
        method, *arguments = command
        try:
            getattr(producer, method)(*arguments)
        except Exception:  # noqa: BLE001 - the test shows it
            commands.send(traceback.format_exc())
        else:
            commands.send("launched")
    torch.cuda.synchronize()
    producer.worker.close()
