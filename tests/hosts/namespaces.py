"""Other hosts, as far as one kernel can be several: namespaces of their own for network, names, processes and
shared memory, joined to this one by cables.

Nothing is left when a host is closed, or when the process that made it dies: its namespaces live as long as `cat`,
their first process, which ends with its stdin.
"""

import contextlib
import functools
import itertools
import os
import random
import signal
import subprocess
import time
from pathlib import Path

from tests.peers import ROOT, children

_KINDS = ("--net", "--uts", "--ipc", "--pid", "--mount")
_STARTS_WITHIN_S = 30.0
_numbers = itertools.count()


class Host:
    """Another host, until it is closed."""

    def __init__(self):
        self._first = subprocess.Popen(
            ["unshare", *_KINDS, "--fork", "--kill-child", "--mount-proc", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self):
        with contextlib.suppress(BrokenPipeError):
            self._first.stdin.write("ready\n")
            self._first.stdin.flush()
        if self._first.stdout.readline() != "ready\n":
            raise OSError(self._first.stderr.read().strip())
        (pid,) = children(self._first.pid)
        self.enter = ["nsenter", f"--target={pid}", *_KINDS, "env", f"--chdir={ROOT}"]
        self._pid = pid
        # It shows the devices of the network that it was mounted in.
        self.run("mount", "-t", "sysfs", "sysfs", "/sys")
        self.run("ip", "link", "set", "lo", "up")

    def run(self, *command):
        """Output of a command there."""
        return run_here(*self.enter, *command)

    @contextlib.contextmanager
    def small_windows(self, num_bytes):
        """Sockets that are made there meanwhile keep so much that has not been read. If a queue on the way holds as
        much, nothing is dropped in it."""
        path = "/proc/sys/net/ipv4/tcp_rmem"
        before = self.run("cat", path)
        smallest = before.split()[0]
        self.run("sh", "-c", f"echo {smallest} {num_bytes} {num_bytes} > {path}")
        try:
            yield
        finally:
            self.run("sh", "-c", f"echo {before} > {path}")

    def kill(self, entered):
        """Kills a process that was started with `enter`, and waits for its end."""
        for pid in children(entered.pid):
            os.kill(pid, signal.SIGKILL)
        entered.wait()

    def close(self):
        """Ends everything that runs there."""
        for stream in (self._first.stdin, self._first.stdout, self._first.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self._first.kill()
        self._first.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def cable(self, near=None):
        """One more connection between here, or another host, and there."""
        return Cable(self, near)

    @property
    def network(self):
        """As arguments of `ip link add`, for a device there."""
        return ("netns", str(self._pid))


class Cable:
    """A network of two: `near` and `far` are the addresses of its ends. It goes with its hosts."""

    def __init__(self, host, near=None):
        self.near, self.far = two_addresses()
        self.name = name = f"kv{os.getpid()}x{next(_numbers)}"
        self._ends = [(near.run if near else run_here, f"{name}a", self.near), (host.run, f"{name}b", self.far)]
        there = ("type", "veth", "peer", "name", f"{name}b", *host.network)
        run_here("ip", "link", "add", f"{name}a", *(near.network if near else ()), *there)
        for run, device, address in self._ends:
            run("ip", "address", "add", f"{address}/30", "dev", device)
        self.join()

    def cut(self, end=0):
        """Nothing gets through any more. The side at the other end is not told."""
        run, device, _ = self._ends[end]
        run("ip", "link", "set", device, "down")

    def join(self):
        """It works again when this returns.

        The kernel starts a device some time after it was set up, longer on a busy machine. Until then it drops what is
        sent, and an address that does not answer within three seconds is unreachable.
        """
        for run, device, _ in self._ends:
            run("ip", "link", "set", device, "up")
        give_up_at = time.monotonic() + _STARTS_WITHIN_S
        for run, device, _ in self._ends:
            while "state UP" not in (state := run("ip", "-o", "link", "show", "dev", device)):
                if time.monotonic() > give_up_at:
                    raise OSError(f"the cable's end does not start: {state.strip()}")
                time.sleep(0.01)

    def disturb(self, *discipline):
        """Makes both ends worse by `tc`."""
        for run, device, _ in self._ends:
            run("tc", "qdisc", "replace", "dev", device, "root", *discipline)

    def shape(self, kind, *arguments):
        """Adds a qdisc, class or filter of `tc` to what the far end sends."""
        run, device, _ = self._ends[1]
        run("tc", kind, "add", "dev", device, *arguments)


def two_addresses():
    """The addresses of a network of two: of the range for benchmarks, which is not routed (RFC 2544)."""
    subnet = random.SystemRandom().randrange(1 << 15) * 4
    network = f"198.{18 + (subnet >> 16)}.{subnet >> 8 & 255}"
    return [f"{network}.{(subnet & 255) + end}" for end in (1, 2)]


def run_here(*command):
    """Output of a command."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"{' '.join(command)}: {done.stderr.strip()}"
        raise OSError(message)
    return done.stdout


@functools.cache
def why_no_hosts():
    """Reason for which this machine has no other hosts; empty if it has."""
    if not Path("/proc/self/ns/net").exists():
        return "no network namespaces"
    try:
        with Host() as host:
            host.cable()
    except OSError as error:
        return f"no network namespaces joined by a cable: {error}"
    return ""
