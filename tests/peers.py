"""Programs that tests run as other processes: `python -m tests.peers PROGRAM ARGUMENT...`.

A program prints what the test needs to know, one line each, and is ended by the test: with the end of its stdin,
a real SIGKILL, or a real SIGINT.
"""

import contextlib
import gc
import json
import logging
import operator
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kvpipe import Agent, EndOfPipeError, KVPipeError, LookupBuffer, PeerLostError, Pipe, TransferTimeoutError, _kvpipe
from kvpipe.control import ControlClient

ROOT = Path(__file__).parents[1]
LIMIT_S = 120.0
MIB = 1 << 20
LARGE = 64 * MIB
LOOPBACK = "127.0.0.1:0"
HELLO = (39).to_bytes(4, "little") + b"\x01KVPP" + bytes(34)


def listening_ports():
    """The TCP ports on which this process listens."""
    mine = {str(entry.readlink()) for entry in list(Path("/proc/self/fd").iterdir()) if entry.is_symlink()}
    tables = [Path(f"/proc/self/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    listening = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine]
    return [int(row[1].rpartition(":")[2], 16) for row in listening]


class Limit(threading.Timer):
    """Calls something unless it is cancelled in time."""

    def __init__(self, call, limit_s=LIMIT_S):
        super().__init__(limit_s, call)
        self.daemon = True
        self.start()


class Child:
    """A program in another process. It is killed after `limit_s`: a test that would hang fails instead."""

    def __init__(self, program, *arguments, limit_s=LIMIT_S, module="tests.peers", host=None):
        self.process = subprocess.Popen(
            [*(host.enter if host else ()), sys.executable, "-m", module, program, *map(str, arguments)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._limit = Limit(self.process.kill, limit_s)
        self.killed_at = []

    def read(self):
        """The next line that it prints."""
        line = self.process.stdout.readline()
        assert line, f"the program ended with status {self.process.wait()}"
        return line.strip()

    def tell(self, line):
        """Writes a line to its stdin."""
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def interrupt(self):
        """Presses Ctrl-C when it says that it waits; it then says so at once."""
        assert self.read() == "waiting"
        time.sleep(0.3)
        sent_at = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        assert self.read() == "KeyboardInterrupt"
        assert time.monotonic() - sent_at < 1.5

    def kill_after(self, delay_s):
        """Kills it with SIGKILL in the background.

        The returned list, and `killed_at`, then hold when, as time.monotonic(), and when the kernel was done with it:
        what was open is closed by then.
        """
        killed_at = self.killed_at

        def kill():
            time.sleep(delay_s)
            killed_at.append(time.monotonic())
            with end_of(self.process.pid) as ended:
                self.process.kill()
                if ended:
                    ends = select.poll()  # of any descriptor, also beside a crowd's
                    ends.register(ended, select.POLLIN)
                    ends.poll()
            killed_at.append(time.monotonic())

        threading.Thread(target=kill, name="killer").start()
        return killed_at

    def stop(self):
        """Stops it, and returns when every thread has stopped."""
        self.process.send_signal(signal.SIGSTOP)
        stats = Path(f"/proc/{self.process.pid}/task")
        wait_until(lambda: {stat.read_text().rpartition(")")[2].split()[0] for stat in stats.glob("*/stat")} == {"T"})

    def end(self):
        self._limit.cancel()
        for pid in children(self.process.pid):  # of what enters a host
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.stdout.close()


@contextlib.contextmanager
def end_of(pid):
    """A file that is readable once the kernel is done with a process; None if it is already."""
    try:
        ended = os.fdopen(os.pidfd_open(pid))
    except ProcessLookupError:
        yield None
    else:
        with ended:
            yield ended


def children(pid):
    """The processes that a process has started."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def say(line):
    print(line, flush=True)


def wait_for_the_end():
    sys.stdin.read()


def echo(address=LOOPBACK, integrity=None):
    """Sends back whatever it receives."""
    receiver = Pipe.listen(address)
    say(receiver.address)
    sender = Pipe.connect(sys.stdin.readline().strip(), integrity=integrity)
    with contextlib.suppress(EndOfPipeError):
        while True:
            sender.send_tensor(receiver.recv_tensor())
    sender.close()
    receiver.close()


def receive_for_ever(address=LOOPBACK):
    """Receives from one sender after the other, at one address."""
    out = np.empty(LARGE, np.uint8)
    while True:
        with contextlib.suppress(KVPipeError), Pipe.listen(address) as receiver:
            address = receiver.address
            say(address)
            while True:
                receiver.recv_tensor(out=out)


def receive_in_order(address=LOOPBACK):
    """Receives tensors that hold their number; says how many came."""
    receiver = Pipe.listen(address)
    say(receiver.address)
    count = 0
    with contextlib.suppress(EndOfPipeError):
        while True:
            received = receiver.recv_tensor()
            assert (received == count).all(), f"tensor {received[0]} instead of {count}"
            count += 1
    say(count)


def receive_some(address=LOOPBACK):
    """Receives tensors that hold their number; says the numbers, and `late` for each that its sender took back."""
    receiver = Pipe.listen(address)
    say(receiver.address)
    received = []
    with contextlib.suppress(EndOfPipeError):
        while True:
            try:
                (number,) = np.unique(receiver.recv_tensor())
                received.append(str(number))
            except TransferTimeoutError:
                received.append("late")
    say(" ".join(received))


def receive_into(num_bytes, address=LOOPBACK):
    """Receives into one buffer; says of each tensor which values are in it, and of the end that it has come."""
    out = np.empty(int(num_bytes), np.uint8)
    receiver = Pipe.listen(address)
    say(receiver.address)
    ends = 0
    while ends < 2:
        try:
            receiver.recv_tensor(out=out)
            say(" ".join(map(str, np.unique(out))))
        except PeerLostError:
            ends += 1
        except TransferTimeoutError:  # the sender took it back
            say("over")
    say("over")


def receive_nothing(address=LOOPBACK):
    receiver = Pipe.listen(address)
    say(receiver.address)
    wait_for_the_end()


def send_for_ever(address):
    sender = Pipe.connect(address)
    tensor = np.ones(LARGE, np.uint8)
    with contextlib.suppress(KVPipeError):
        while True:
            sender.send_tensor(tensor)


def send_nothing(address):
    sender = Pipe.connect(address)
    say(sender.transport)
    wait_for_the_end()


def say_half_a_hello(address, num_bytes):
    """Connects, says the first bytes of a hello, and no more."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(HELLO[: int(num_bytes)])
        say("said")
        wait_for_the_end()


def say_garbage(address, seed):
    """Says anything, whole beginnings of hellos among it, until it is cut off, again and again."""
    rng = random.Random(int(seed))
    host, port = address.rsplit(":", 1)
    say("said")
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))) as connection:
            start = rng.choice((b"", HELLO[: rng.randrange(len(HELLO))], HELLO))
            connection.sendall(start + rng.randbytes(rng.randrange(4096)))
            connection.shutdown(socket.SHUT_WR)
            connection.recv(MIB)


def endless_waits(receiver, sender):
    """Calls that wait for something that never comes, by name."""
    silent, agent = socket.create_server(("127.0.0.1", 0)), Agent()

    def address():
        return "{}:{}".format(*silent.getsockname())

    def close():
        sender.send_tensor(np.zeros(1))
        sender.close(timeout=None)

    return {
        "recv": receiver.recv_tensor,
        "send": lambda: sender.send_tensor(np.ones(LARGE, np.uint8)),
        "wait": lambda: sender.isend_tensor(np.ones(LARGE, np.uint8)).wait(),
        "close": close,
        "connect": lambda: Pipe.connect(address(), timeout=100),
        "agent": lambda: agent.connect(address(), timeout=None),
    }


def interrupted(end):
    """Waits without end in Python's main thread; says how that ended, and what is received afterwards."""
    receiver = Pipe.listen()
    sender = Pipe.connect(receiver.address)
    wait = endless_waits(receiver, sender)[end]
    try:
        say("waiting")
        wait()
    except KeyboardInterrupt:
        say("KeyboardInterrupt")
    if end == "recv":
        works = [sender.isend_tensor(np.full(size, size)) for size in (1, MIB)]
        say([int(receiver.recv_tensor(timeout=20)[0]) for _ in works])


def exits_while_others_wait(end):
    """Ends its main thread while daemon threads wait, or send and receive."""
    receiver = Pipe.listen()
    sender = Pipe.connect(receiver.address)
    waits = endless_waits(receiver, sender)
    ends = ["send", "recv"] if end == "both" else [end]
    for name in ends:
        threading.Thread(target=again_and_again, args=(waits[name],), daemon=True).start()
    time.sleep(0.2)


def again_and_again(call):
    while True:
        call()


def receive_and_weigh(num_tensors):
    """Receives fresh tensors and says how much memory the process had after the fifth and after the last."""
    receiver = Pipe.listen()
    say(receiver.address)
    weights = []
    for _ in range(int(num_tensors)):
        received = receiver.recv_tensor()
        del received
        weights.append(resident_bytes())
    say(json.dumps([weights[4], weights[-1]]))
    receiver.close()


def resident_bytes():
    """The memory of this process that is in RAM."""
    gc.collect()
    return status_bytes("VmRSS")


def status_bytes(*fields):
    """The sum of some sizes that the kernel tells of this process."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(status[field].split()[0]) for field in fields) * 1024


@contextlib.contextmanager
def serving(num_blocks, block_bytes, address=LOOPBACK):
    """An agent with two regions: `kv` dense, and `strided` with a gap after each block."""
    with Agent(listen=address) as agent:
        agent.register(pattern(num_blocks, block_bytes), "kv", block_bytes, writable=True)
        agent.register(pattern(num_blocks, 2 * block_bytes), "strided", block_bytes, stride=2 * block_bytes)
        yield agent


def serve_blocks(num_blocks, block_bytes, address=LOOPBACK):
    with serving(int(num_blocks), int(block_bytes), address) as agent:
        say(agent.address)
        wait_for_the_end()


def announce_handoffs(num_handoffs, block_bytes, address=LOOPBACK):
    """An agent that has announced handoffs of one block each: the number of the block, 16 times, is the id."""
    with Agent(listen=address) as agent:
        blocks = pattern(int(num_handoffs), int(block_bytes))
        region = agent.register(blocks, "kv", int(block_bytes))
        ready = [(bytes([number] * 16), 0, [number]) for number in range(int(num_handoffs))]
        agent._native.mark_ready(_kvpipe.ReadyBlocks(ready), [region._native])
        say(f"{agent.address} {agent._native.incarnation.hex()}")
        wait_for_the_end()


def connect_many(count):
    """Has many agents connect to an address at one instant, and then to the next one."""
    agents = [Agent() for _ in range(int(count))]
    say("ready")
    with ThreadPoolExecutor(len(agents)) as threads:
        for line in sys.stdin:
            peers = list(threads.map(operator.methodcaller("connect", line.strip(), timeout=LIMIT_S), agents))
            say(f"{len(peers)} connected")


def drain_notifications(num_blocks, block_bytes, address=LOOPBACK):
    """An agent whose region `kv` may be written; says each notification, and 4 bytes of the block that it names."""
    num_blocks, block_bytes = int(num_blocks), int(block_bytes)
    memory = np.zeros((num_blocks, block_bytes // 4), np.uint32)
    with Agent(address) as agent:
        agent.register(memory, "kv", block_bytes, writable=True)
        say(agent.address)
        while True:
            for peer, tag in agent.notifications():
                say(f"{tag.decode()} {memory[int(tag), 0]} {peer.transport}")


def never_drain_notifications(num_blocks, block_bytes):
    """An agent whose region `kv` may be written, and whose user does not look at notifications."""
    with Agent() as agent:
        agent.register(bytearray(int(num_blocks) * int(block_bytes)), "kv", int(block_bytes), writable=True)
        say(agent.address)
        wait_for_the_end()


def wait_until(is_so, within_s=20):
    """Waits until something is so that takes no time."""
    give_up_at = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < give_up_at, "not so in time"
        time.sleep(0.005)


def pattern(num_blocks, block_bytes):
    """Blocks that differ from each other in every 4 bytes."""
    return np.arange(num_blocks * block_bytes // 4, dtype=np.uint32).reshape(num_blocks, -1)


def forked():
    """A child of fork() gets errors from the objects of its parent, and the parent goes on."""
    receiver = Pipe.listen()
    sender = Pipe.connect(receiver.address)
    agent = Agent()
    receiving = receiver.irecv_tensor()
    pid = os.fork()
    if pid == 0:
        tries = (
            receiving.wait,
            lambda: receiver.recv_tensor(timeout=0),
            lambda: sender.send_tensor(np.ones(2)),
            lambda: agent.register(np.ones(2), "kv", 8),
            Pipe.listen,
            sender.close,
            receiver.close,
            agent.close,
        )
        outcomes = [outcome(attempt) for attempt in tries]
        # A thread of the child's own, which may have the place of one that only the parent has.
        client = ControlClient()
        receiver = sender = agent = receiving = tries = None
        gc.collect()
        say(json.dumps([*outcomes, outcome(client.close)]))
        os._exit(0)
    os.waitpid(pid, 0)
    sender.send_tensor(np.arange(3))
    say(receiving.wait().tolist())


def serve_entries(capacity_bytes, address=LOOPBACK):
    """A lookup buffer for others; answers each line of its stdin with its counters."""
    with LookupBuffer(int(capacity_bytes)) as buffer:
        buffer.serve(address)
        say(buffer.address)
        for _ in sys.stdin:
            say(json.dumps(vars(buffer.stats())))


def insert_numbered(address, first, count):
    """Inserts entries whose only token is their number."""
    with LookupBuffer.connect(address, timeout=60) as buffer:
        for number in range(int(first), int(first) + int(count)):
            buffer.insert(np.array([number]), None, np.full(16, number), None, None)
    say("done")


def consume_numbered(address):
    """Takes entries for ever and says their numbers."""
    buffer = LookupBuffer.connect(address, timeout=60)
    say("ready")
    with contextlib.suppress(KVPipeError):
        while True:
            tokens, _, key, _, _ = buffer.drop_select(None, None)
            assert (key == tokens[0]).all()
            say(tokens[0])


def consume_one(address):
    """Takes one entry; says how that ended."""
    buffer = LookupBuffer.connect(address, timeout=60)
    say("ready")
    say(outcome(lambda: buffer.drop_select(None, None)))
    wait_for_the_end()


def consume_one_without_torch(address):
    sys.modules["torch"] = None  # what `import torch` finds where there is none
    buffer = LookupBuffer.connect(address, timeout=60)
    say(outcome(lambda: buffer.drop_select(None, None)))
    wait_for_the_end()


def insert_for_ever(address, num_bytes):
    buffer = LookupBuffer.connect(address, timeout=60)
    tensor = np.ones(int(num_bytes), np.uint8)
    say("ready")
    while True:
        buffer.insert(np.array([1]), None, tensor, None, None)


def interrupted_entries(what, is_remote):
    """Waits without end in Python's main thread; says how that ended, and what is left of it."""
    server = LookupBuffer(5000)
    buffer = server
    if int(is_remote):
        server.serve()
        buffer = LookupBuffer.connect(server.address)
    tokens, full = np.arange(2, dtype=np.int8), np.ones(2500, np.int8)
    buffer.insert(tokens, None, full, None, None)
    waits = {
        "select": lambda: buffer.drop_select(tokens + 1, None),
        "insert": lambda: buffer.insert(tokens, None, full, None, None),
    }
    try:
        say("waiting")
        waits[what]()
    except KeyboardInterrupt:
        say("KeyboardInterrupt")
    while server.stats().num_waiting:
        time.sleep(0.01)
    say(server.stats().num_entries)


def forked_entries():
    """A child of fork() gets errors from the lookup buffers of its parent, and the parent goes on."""
    server = LookupBuffer()
    server.serve()
    client = LookupBuffer.connect(server.address)
    tokens = np.arange(3)
    server.insert(tokens, None, None, None, None)
    pid = os.fork()
    if pid == 0:
        tries = [
            attempt
            for buffer in (server, client)
            for attempt in (
                lambda buffer=buffer: buffer.insert(tokens, None, None, None, None),
                lambda buffer=buffer: buffer.drop_select(None, None, timeout=0),
                buffer.close,
            )
        ]
        say(json.dumps([outcome(attempt) for attempt in tries]))
        os._exit(0)
    os.waitpid(pid, 0)
    say(client.drop_select(None, None)[0].tolist())


def outcome(attempt):
    try:
        attempt()
    except Exception as error:  # noqa: BLE001 - the test asks which
        return type(error).__name__
    return "fine"


PROGRAMS = {
    program.__name__: program
    for program in (
        echo,
        exits_while_others_wait,
        forked,
        forked_entries,
        insert_for_ever,
        insert_numbered,
        interrupted,
        interrupted_entries,
        never_drain_notifications,
        receive_and_weigh,
        receive_for_ever,
        receive_in_order,
        receive_some,
        receive_into,
        receive_nothing,
        send_for_ever,
        say_garbage,
        say_half_a_hello,
        send_nothing,
        serve_blocks,
        announce_handoffs,
        serve_entries,
        consume_numbered,
        connect_many,
        consume_one,
        consume_one_without_torch,
        drain_notifications,
    )
}

if __name__ == "__main__":
    logging.getLogger("kvpipe").setLevel(logging.ERROR)  # that TCP is slower than CMA is known
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
