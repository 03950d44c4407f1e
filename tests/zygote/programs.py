"""Program that a zygote forks for tests: `python -m tests.zygote.programs ACTION`."""

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    """Prints its environment, or ends as asked."""
    action = sys.argv[1]
    if action == "facts":
        facts = {
            "arguments": sys.argv[2:],
            "variable": os.environ.get("OF_THE_CLIENT"),
            "folder": str(Path.cwd()),
            "group": os.getpgrp(),
            "num_descriptors": len(list(Path("/proc/self/fd").iterdir())) - 1,
        }
        print(json.dumps(facts))
        print("of the program", file=sys.stderr)
    elif action == "maps":
        print(Path("/proc/self/maps").read_text())
    elif action == "exit":
        sys.exit(int(sys.argv[2]))
    elif action == "die":
        os.kill(os.getpid(), int(sys.argv[2]))
    elif action == "wait":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))
        print("waiting", flush=True)
        time.sleep(60)


if __name__ == "__main__":
    main()
