"""`python -m tests.soak`: rounds of everything at once. Ends with counts; fails on a hang, a leak, a wrong byte, or a
healthy operation that was hit by what happens to others."""

import argparse
import ctypes
import faulthandler
import logging
import os
import random
import statistics
import sys
import time
import traceback
from collections import Counter

from bench.progress import Progress
from tests.faults.__main__ import DATA_PATHS, leaked, use
from tests.faults.rounds import Holdings
from tests.soak.actors import ACTORS, Round, begin
from tests.soak.clock import Clock
from tests.soak.healthy import INTEGRITIES, Pair

ROUND_S = 10.0
# Nothing that an actor does takes as long.
HANG_S = 90.0
# Until every actor has opened what stays open, and the allocator has what it keeps.
WARM_UP = 2
MORE_BYTES = 64 << 20
# After so many reads with short deadlines, one that was late is missed.
NUM_READS = 100
# Of late detections, the latest.
NUM_TOLD = 20
# Of glibc: from this size on, memory that is freed goes back to the kernel, so that what is held can be counted.
M_MMAP_THRESHOLD, KEPT_BYTES = -3, 64 << 10


def main(argv=None):
    options = _parse(argv)
    logging.getLogger("kvpipe").setLevel(logging.ERROR)  # that TCP is slower is known
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
    num_rounds = max(WARM_UP + 1, round(options.minutes * 60 / ROUND_S))
    print(f"seed {options.seed}, {num_rounds} rounds of {ROUND_S:.0f} s", flush=True)
    progress, before, failures = Progress(), None, []
    shared = {"counts": Counter(), "times": {}, "clock": Clock(), "late": [], "hits": []}
    progress.expect(num_rounds)
    for number in range(num_rounds):
        data_path = list(DATA_PATHS)[number % len(DATA_PATHS)]
        integrity = INTEGRITIES[number // len(DATA_PATHS) % len(INTEGRITIES)]
        use(data_path)
        failures = _round(f"{options.seed} {number}", shared, integrity, options.without)
        done = (f"{shared['counts'][what]} {what}" for what in ("tensors", "blocks", "entries", "faults", "healthy"))
        label = f"{data_path}, {integrity}: {', '.join(done)}, {len(shared['hits'])} hit"
        progress.step(label)
        progress.line(f"round {number + 1} of {num_rounds}, {label}, {_held().num_bytes >> 20} MiB held")
        if failures:
            break
        if number + 1 == WARM_UP:
            before = _held()
    progress.end()
    lost = leaked(before, _held(before), MORE_BYTES) if before else "unknown"
    return _tell(shared, failures, lost)


def _held(before=None):
    ctypes.CDLL(None).malloc_trim(0)
    return Holdings.settled(before) if before else Holdings.now()


def _round(seed, shared, integrity, without):
    with Pair(integrity) as pair:
        actors = [actor for actor in ACTORS if actor.__name__ not in without]
        return _act(seed, Round(time.monotonic() + ROUND_S, **shared, pair=pair), actors)


def _act(seed, shared, actors):
    failures = []
    threads = {actor.__name__: begin(actor, f"{seed} {actor.__name__}", shared, failures) for actor in actors}
    begun = time.monotonic()
    while any(thread.is_alive() for thread in threads.values()):
        for name, thread in threads.items():
            thread.join(0.2)
            if thread.is_alive() and time.monotonic() - shared.done_at.get(name, begun) > HANG_S:
                _hang(name)
    return failures


def _hang(name):
    print(f"hang: {name} did nothing for {HANG_S:.0f} s", flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(2)


def _tell(shared, failures, lost):
    for name, error in failures:
        print(f"{name} failed:")
        traceback.print_exception(error)
    print(", ".join(f"{count} {what}" for what, count in sorted(shared["counts"].items())))
    for hit in shared["hits"][:NUM_TOLD]:
        print(f"hit: {hit}")
    for late in sorted(shared["late"], key=lambda late: -late.seconds)[:NUM_TOLD]:
        print(f"late: {late}")
    for fault, seconds in sorted(shared["times"].items()):
        median, worst = statistics.median(seconds) * 1e3, max(seconds) * 1e3
        figures = f", median {median:.1f} ms, max {worst:.1f} ms" if worst else ""
        print(f"{fault:24}{len(seconds):6} times{figures}")
    num_healthy, num_hit = shared["counts"]["healthy"], len(shared["hits"])
    print(f"healthy operations {num_healthy}, hit by others {num_hit}")
    print(f"hangs 0, failures {len(failures)}, leaked {lost}")
    was_never_late = not shared["counts"]["late_reads"] and shared["counts"]["timely_reads"] >= NUM_READS
    if was_never_late:
        print(f"none of {shared['counts']['timely_reads']} reads was late: nothing disturbed the healthy ones")
    return 1 if failures or num_hit or was_never_late or lost != "nothing" else 0


def _parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="default 30")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of everything")
    names = [actor.__name__ for actor in ACTORS]
    parser.add_argument("--without", nargs="+", choices=names, default=[], help="actors that do nothing")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
