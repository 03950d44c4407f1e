"""Stands for a program that a zygote forks: `python -I -S client.py SOCKET MODULE ARGUMENT...`.

It passes its arguments, environment, folder and descriptors on, then signals, and ends as the program does.
"""

import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def main() -> None:
    """Has the program forked, and waits until it has ended."""
    program = 0
    pending = []

    def forward(number: int, frame: object) -> None:
        if not program:
            pending.append(number)
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(program, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        request = {
            "module": sys.argv[2],
            "arguments": sys.argv[3:],
            "env": dict(os.environ),
            "folder": os.getcwd(),  # noqa: PTH109 - pathlib would take as long as all of this
            "group": os.getpgrp(),
        }
        payload = json.dumps(request).encode()
        socket.send_fds(connection, [len(payload).to_bytes(4, "little")], [0, 1, 2])
        connection.sendall(payload)
        with connection.makefile() as answers:
            for line in answers:
                answer = json.loads(line)
                if "error" in answer:
                    sys.exit(f"zygote: {answer['error']}")
                if "status" in answer:
                    end_like(answer["status"])
                program = answer["pid"]
                for number in pending:
                    forward(number, None)
    sys.exit("zygote: it ended before the program that it had forked")


def end_like(status: int) -> None:
    """Ends this process as `os.waitpid` says that another one has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
