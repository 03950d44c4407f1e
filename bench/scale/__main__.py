"""One sample of one point: `python -m bench.scale PEERS LOADS HANDOFFS_PER_S` prints its costs as words."""

import sys
from contextlib import closing

from bench.programs.request import compose
from bench.scale.agents import Loads
from bench.scale.control import ControlPlane
from bench.scale.point import Point
from kvpipe.exceptions import KVPipeError


def main() -> int:
    """Measures, and prints what was measured."""
    num_peers, num_loads, handoffs_per_s = map(int, sys.argv[1:])
    point = Point(num_peers, num_loads)
    try:
        with closing(Loads(point)) as agents:
            costs = agents.costs()
        with closing(ControlPlane(point)) as ports:
            costs |= ports.at_rate(handoffs_per_s)
    except KVPipeError as error:
        sys.stdout.write(f"error {error}\n")
        return 1
    sys.stdout.write(compose("ok", costs) + "\n")
    return 0


sys.exit(main())
