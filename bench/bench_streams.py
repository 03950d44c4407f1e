"""Several connections of a session, between two network namespaces: `python -m bench.bench_streams`, as root.

First, blocks over a link that gives each TCP connection 1 Gbit/s, by the number of streams. Then the round trip of a
notification of 8 B while blocks fill the same session: over loopback, and over a link of 1 Gbit/s.

With `--round-trip MS`, blocks over loopback that has such a round trip, and no more. That delays all of loopback, and
needs a kernel with netem; one has it in `tests/rdma/run .venv/bin/python -m bench.bench_streams --round-trip 20`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from kvpipe import Agent, Peer
from tests.hosts.namespaces import Cable, Host
from tests.peers import MIB, Child, pattern, say

if TYPE_CHECKING:
    from collections.abc import Iterator

NUM_BLOCKS = 64
BLOCKS = list(range(NUM_BLOCKS))
NUM_FLOWS = 64
TAG, END = b"8 bytes.", b"the end."
FLOW = ("rate", "1gbit", "burst", "128k", "cburst", "128k")
LINK = ("tbf", "rate", "1gbit", "burst", "128kb", "latency", "20ms")


def serve(address: str) -> None:
    """The other side: blocks to read, and an answer to each notification."""
    with Agent(listen=address) as agent:
        agent.register(pattern(NUM_BLOCKS, MIB), "kv", MIB)
        say(agent.address)
        while True:
            for peer, tag in agent.notifications():
                if tag == END:
                    return
                peer.notify(tag)


@contextlib.contextmanager
def connected(address: str, local: str) -> Iterator[tuple[Agent, Peer, threading.Thread, threading.Event, list[int]]]:
    """An agent that has read all blocks once, and a thread that reads them again and again until it is told to stop."""
    with Agent(local) as agent:
        region = agent.register(np.zeros((NUM_BLOCKS, MIB), np.uint8), "here", MIB)
        peer, stopped, moved = agent.connect(address), threading.Event(), [0]
        peer.read_blocks(region, BLOCKS, "kv", BLOCKS).wait(60)

        def read() -> None:
            under_way = [peer.read_blocks(region, BLOCKS, "kv", BLOCKS)]
            while not stopped.is_set():
                under_way.append(peer.read_blocks(region, BLOCKS, "kv", BLOCKS))
                moved[0] += under_way.pop(0).wait(60)
            under_way[0].wait(60)

        yield agent, peer, threading.Thread(target=read), stopped, moved
        peer.notify(END)


def rate_of(peer: Peer, region: object) -> float:
    """GB/s of one read of all blocks."""
    begun = time.perf_counter()
    return peer.read_blocks(region, BLOCKS, "kv", BLOCKS).wait(60) / (time.perf_counter() - begun) / 1e9


def limit_flows(cable: Cable) -> None:
    """What the far end sends has 1 Gbit/s for each value of six bits of the destination's port."""
    cable.shape("qdisc", "root", "handle", "1:", "htb", "default", "ffff")
    for flow in range(NUM_FLOWS):
        flow_class = f"1:{flow + 16:x}"
        port = ("dport", hex(flow << 1), hex((NUM_FLOWS - 1) << 1))
        cable.shape("class", "parent", "1:", "classid", flow_class, "htb", *FLOW)
        cable.shape("filter", "parent", "1:", "protocol", "ip", "u32", "match", "ip", *port, "flowid", flow_class)


def delay_loopback(one_way_ms: float) -> None:
    """Keeps all that goes over loopback for so long, until the machine ends."""
    netem = "netem", "delay", f"{one_way_ms}ms", "limit", "100000"
    subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", *netem], check=True)  # noqa: S603, S607 - the machine's own


def compare_streams(there: str, here: str, host: Host | None, rounds: int) -> None:
    """Reads all blocks with each number of streams, in turn."""
    child = Child("serve", f"{there}:0", module="bench.bench_streams", host=host)
    address = child.read()
    with contextlib.ExitStack() as stack:
        peers = {}
        for streams in (1, 2, 4, 8):
            os.environ["KVPIPE_STREAMS"] = str(streams)
            agent = stack.enter_context(Agent(f"{here}:0"))
            region = agent.register(np.zeros((NUM_BLOCKS, MIB), np.uint8), "here", MIB)
            peers[streams] = agent.connect(address), region
        measured = [{streams: rate_of(*peer) for streams, peer in peers.items()} for _ in range(rounds + 1)][1:]
        for streams in peers:
            rates = [one[streams] for one in measured]
            ratio = statistics.median(one[streams] / one[1] for one in measured)
            print(f"{streams} streams: {statistics.median(rates):.3f} GB/s ({ratio:.2f} of 1 stream)", flush=True)
    child.end()


def measure_beside(name: str, address: str, local: str, seconds: float) -> None:
    """Round trips without bulk, then beside it."""
    with connected(address, local) as (agent, peer, thread, stopped, moved):
        for bulk in (False, True):
            if bulk:
                thread.start()
                time.sleep(0.3)  # its windows are full
            before, begun, trips = moved[0], time.perf_counter(), []
            while time.perf_counter() < begun + seconds:
                sent = time.perf_counter()
                peer.notify(TAG)
                agent.notifications(30)
                trips.append(time.perf_counter() - sent)
                time.sleep(0.002)
            rate = (moved[0] - before) / (time.perf_counter() - begun) / 1e9
            trips.sort()
            shown = ", ".join(f"p{share} {trips[share * len(trips) // 100] * 1e3:.2f}" for share in (50, 90, 99))
            print(f"{name}, beside {rate:.2f} GB/s: {shown} ms of {len(trips)} round trips", flush=True)
        stopped.set()
        thread.join()


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--round-trip", type=float, metavar="MS")
    arguments = parser.parse_args()
    os.environ |= {"KVPIPE_TOKEN": "a token that both sides have", "KVPIPE_DATA_PATH": "tcp"}
    if arguments.round_trip:
        delay_loopback(arguments.round_trip / 2)
        os.environ.setdefault("KVPIPE_ENCRYPTION", "on")
        compare_streams("127.0.0.1", "127.0.0.1", None, arguments.rounds)
        return
    with Host() as host:
        cable = host.cable()
        limit_flows(cable)
        compare_streams(cable.far, cable.near, host, arguments.rounds)
        cable = host.cable()
        cable.disturb(*LINK)
        for encryption, streams in (("off", "1"), ("on", "1"), ("on", "4")):
            os.environ |= {"KVPIPE_ENCRYPTION": encryption, "KVPIPE_STREAMS": streams}
            name = f"encryption {encryption}, streams {streams}"
            child = Child("serve", "127.0.0.1:0", module="bench.bench_streams")
            measure_beside(f"loopback, {name}", child.read(), "127.0.0.1:0", arguments.seconds)
            child.end()
            child = Child("serve", f"{cable.far}:0", module="bench.bench_streams", host=host)
            measure_beside(f"1 Gbit/s, {name}", child.read(), f"{cable.near}:0", arguments.seconds)
            child.end()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
    else:
        main()
