"""`python -m tests.faults`: many rounds of every fault at every stage on every data path, and a table."""

import argparse
import contextlib
import logging
import os
import random
import statistics
import sys
from dataclasses import dataclass
from functools import partial

from tests.faults.rounds import FAULTS, LOCAL, Holdings
from tests.faults.stages import Place
from tests.hosts.namespaces import Cable, Host, why_no_hosts
from tests.peers import Child

DATA_PATHS = {"default": None, "tcp": "tcp"}
# A cable joins hosts that share no memory: whatever UCX may use, it is TCP.
WIRES = ("tcp",)
# Descriptors that Python opens on its way; memory that the allocator keeps.
MORE_DESCRIPTORS, MORE_BYTES = 2, 64 << 20
# So many rounds that most of them say something.
ENOUGH = 10


@dataclass(frozen=True)
class Abroad(Place):
    """On another host."""

    cable: Cable | None = None


def main(argv=None):
    options = _parse(argv)
    rng = random.Random(options.seed)
    logging.getLogger("kvpipe").setLevel(logging.ERROR)  # that TCP is slower is known
    print(f"seed {options.seed}, {options.rounds} rounds of each")
    print(f"{'fault':10}{'stage':28}{'data path':11}{'median ms':>10}{'p99 ms':>9}{'max ms':>9}  leaked")
    is_fine = True
    for name in options.faults:
        for data_path in options.data_paths:
            is_fine &= _strike(FAULTS[name], (name, data_path), options, rng)
    return 0 if is_fine else 1


def _strike(fault, names, options, rng):
    _, data_path = names
    if fault.needs_cable and data_path not in WIRES:
        return True
    if fault.needs_cable and why_no_hosts():
        print(f"{names[0]:10}skipped: {why_no_hosts()}")
        return True
    is_fine = True
    use(data_path)
    with _place(fault) as place:
        fault.strike(fault.stages[-1], rng, place)  # opens what stays open
        for stage in fault.stages:
            label = f"{names[0]:10}{stage.__name__:28}{names[1]:11}"
            is_fine &= _repeat(label, fault, partial(fault.strike, stage, rng, place), options)
    return is_fine


@contextlib.contextmanager
def _place(fault):
    if not fault.needs_cable:
        yield LOCAL
        return
    with Host() as host:
        cable = host.cable()
        os.environ["KVPIPE_TOKEN"] = "the token of the tests"
        try:
            start = lambda *arguments: Child(*arguments, host=host)  # noqa: E731
            yield Abroad(f"{cable.near}:0", f"{cable.far}:0", start, cable)
        finally:
            del os.environ["KVPIPE_TOKEN"]


def _repeat(label, fault, strike, options):
    times = [strike() for _ in range(options.warm_up)]
    before = Holdings.now()
    times += [strike() for _ in range(options.rounds)]
    lost = leaked(before, Holdings.settled(before))
    median, most, worst = statistics.median(times), _p99(times), max(times)
    figures = "".join(f"{each * 1e3:{width}.1f}" for each, width in ((median, 10), (most, 9), (worst, 9)))
    print(f"{label}{figures}  {lost}", flush=True)
    is_prompt = worst < fault.all_s and (most < fault.most_s or len(times) < ENOUGH)
    return is_prompt and lost == "nothing"


def _p99(times):
    """Of fewer than 100, all but the worst."""
    return sorted(times)[max(0, len(times) - 1 - max(1, len(times) // 100))]


def leaked(before, after, more_bytes=MORE_BYTES):
    """Resources acquired in between, beyond those that Python and the allocator keep; or "nothing"."""
    more = [
        f"{after.num_descriptors - before.num_descriptors} descriptors"
        if after.num_descriptors > before.num_descriptors + MORE_DESCRIPTORS
        else "",
        f"{after.num_threads - before.num_threads} threads" if after.num_threads > before.num_threads else "",
        f"{(after.num_bytes - before.num_bytes) >> 20} MiB" if after.num_bytes > before.num_bytes + more_bytes else "",
        f"{after.num_pinned_bytes - before.num_pinned_bytes} pinned bytes"
        if after.num_pinned_bytes > before.num_pinned_bytes
        else "",
    ]
    return ", ".join(filter(None, more)) or "nothing"


def use(data_path):
    """Sets the data path of later connections."""
    os.environ.pop("KVPIPE_DATA_PATH", None)
    if DATA_PATHS[data_path]:
        os.environ["KVPIPE_DATA_PATH"] = DATA_PATHS[data_path]


def _parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each fault, stage and data path; default 20")
    parser.add_argument(
        "--warm-up", type=int, default=3, help="more rounds of each, before leaks are counted; default 3"
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="of the moments")
    parser.add_argument("--data-paths", nargs="+", choices=DATA_PATHS, default=list(DATA_PATHS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
