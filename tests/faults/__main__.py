"""`python -m tests.faults`: many rounds of every fault at every stage on every road, and a table."""

import argparse
import os
import random
import statistics
import sys

from tests.faults.rounds import FAULTS, Bound, Holdings
from tests.faults.stages import FATAL, HARMLESS

ROADS = {"default": None, "tcp": "tcp"}
WARM_UP = 3
# Two for what Python opens on its way; memory that the allocator keeps.
MORE_DESCRIPTORS, MORE_BYTES = 2, 64 << 20


def main(argv=None):
    options = _parse(argv)
    rng = random.Random(options.seed)
    print(f"seed {options.seed}, {options.rounds} rounds of each")
    print(f"{'fault':6}{'stage':28}{'road':9}{'median ms':>10}{'max ms':>9}  leaked")
    is_fine = True
    for road in options.roads:
        _take(road)
        for fault in options.faults:
            for stage in (*HARMLESS, *FATAL):
                is_fine &= _repeat(fault, stage, road, options.rounds, rng)
    return 0 if is_fine else 1


def _repeat(fault, stage, road, num_rounds, rng):
    bound = Bound().late_s if fault == "stop" else Bound().lost_s
    times, before = [], None
    for number in range(num_rounds + WARM_UP):
        times.append(FAULTS[fault](stage, rng))
        if number + 1 == WARM_UP:
            before = Holdings.now()
    leaked = _leaked(before, Holdings.settled(before))
    worst = max(times)
    row = f"{fault:6}{stage.__name__:28}{road:9}{statistics.median(times) * 1e3:10.1f}{worst * 1e3:9.1f}  {leaked}"
    print(row, flush=True)
    return worst < bound and leaked == "nothing"


def _leaked(before, after):
    more = [
        f"{after.num_descriptors - before.num_descriptors} descriptors"
        if after.num_descriptors > before.num_descriptors + MORE_DESCRIPTORS
        else "",
        f"{after.num_threads - before.num_threads} threads" if after.num_threads > before.num_threads else "",
        f"{(after.num_bytes - before.num_bytes) >> 20} MiB" if after.num_bytes > before.num_bytes + MORE_BYTES else "",
    ]
    return ", ".join(filter(None, more)) or "nothing"


def _take(road):
    os.environ.pop("UCX_TLS", None)
    if ROADS[road]:
        os.environ["UCX_TLS"] = ROADS[road]


def _parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each fault, stage and road; default 20")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the moments")
    parser.add_argument("--roads", nargs="+", choices=ROADS, default=list(ROADS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
