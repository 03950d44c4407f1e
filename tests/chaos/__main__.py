"""`python -m tests.chaos`: a run, and a table. Ends with 1 if a promise was broken."""

import argparse
import secrets
import sys
import tempfile
from pathlib import Path

from bench import chaos, machine
from bench.processes import SubjectError
from kvpipe.exceptions import KVPipeError
from tests.chaos.instances import InstanceChaos
from tests.chaos.processes import StartError
from tests.chaos.run import Chaos, zygote


def main(argv=None):
    options = _parse(argv)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="kvpipe-chaos-") as folder:
        logs = options.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        try:
            outcomes = _run(options, logs)
        except (StartError, SubjectError, KVPipeError) as error:
            sys.exit(str(error))
    facts = {**machine.machine(), "seed": options.seed}
    chaos.show(facts, {"instances" if options.vllm else "engines": outcomes}, options.json)
    return 0 if outcomes.is_clean else 1


def _run(options, logs):
    if options.vllm:
        return InstanceChaos(options.requests or 300, options.seed, logs).run()
    with zygote(logs / "zygote.log") as forks:
        return Chaos(forks, options.requests or 10_000, options.seed, logs).run()


def _parse(argv):
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--requests", type=int, help="default 10000, or 300 with --vllm")
    parser.add_argument("--vllm", action="store_true", help="real vLLM instances behind a proxy and a broker; 12 GB")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32), help="by default another one each time")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of the engines")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
