"""Takes vLLM's place in tests of `kvpipe up`: same command line, same process tree, starts at once.

What is tested there is the launcher: ports, health, logs, signals, and that nothing is left behind.
A real instance takes a minute to start and cannot be told to die at a given moment; real ones are
under the launcher in the end-to-end tests and in `make demo`. Like vLLM, this one starts a child
that does the work, ends it on SIGTERM, and leaves it behind when it is killed itself.

The model's name says how to behave: `dies` ends at once, `stubborn` ignores SIGTERM, `slow` ends a
second after it.
"""

import argparse
import http.server
import os
import signal
import subprocess
import sys
import time


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="fine")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    args, rest = parser.parse_known_args()
    print(f"stand-in arguments: {rest}", flush=True)
    print(f"stand-in token: {os.environ.get('KVPIPE_TOKEN')}", flush=True)
    if args.model == "dies":
        print("out of memory, for example", flush=True)
        sys.exit(3)
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

    def end(*_):
        if args.model == "slow":
            time.sleep(1)
        if args.model != "stubborn":
            worker.kill()
            worker.wait()
            os._exit(0)

    signal.signal(signal.SIGTERM, end)
    http.server.ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
