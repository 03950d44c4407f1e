"""Sends tensors from one process to another: this one listens, starts the sender, and receives.

    python examples/two_processes.py

The tensors are torch's where torch is installed (with numpy), else numpy's. The calls are the same.
"""

import subprocess
import sys

import kvpipe

try:
    import torch as xp  # xp is the usual name for either of several array libraries
except ImportError:
    import numpy as xp  # noqa: ICN001 - not only numpy

NUM_TENSORS = 4
NUM_VALUES = 4 << 20  # 16 MiB of float32: large enough to be offered and fetched, not sent inside a message


def send(address: str) -> None:
    """What the other process does."""
    with kvpipe.Pipe.connect(address) as pipe:
        for number in range(NUM_TENSORS):
            pipe.send_tensor(xp.full((NUM_VALUES,), number, dtype=xp.float32))
        pipe.send_tensor(None)


def receive() -> None:
    """Listens, starts the sender, and receives until it says with `None` that this was all."""
    with kvpipe.Pipe.listen("127.0.0.1:0") as pipe:
        sender = subprocess.Popen([sys.executable, __file__, str(pipe.address)])  # noqa: S603 - this very file
        while (tensor := pipe.recv_tensor(timeout=60)) is not None:
            print(f"received {tensor.dtype} {tuple(tensor.shape)}, all {tensor[0]:g}")
        sender.wait(timeout=60)
        stats = pipe.stats()
        print(f"{stats.num_tensors} tensors, {stats.num_bytes:,} bytes over {stats.transport}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        send(sys.argv[1])
    else:
        receive()
