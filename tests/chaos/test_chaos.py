"""A short run of `python -m tests.chaos`, and that it sees what breaks: else its silence means nothing."""

import importlib.util
import os
import random
import signal
import socket
import threading
from collections import Counter
from multiprocessing.shared_memory import SharedMemory

import pytest

from kvpipe.launch.ports import free_ports, release_ports
from tests.chaos.relay import HERE, RELAYED, Relay

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: run make setup", allow_module_level=True)

from tests.chaos import run
from tests.chaos.run import Chaos, zygote

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    """The process from which engines are forked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with zygote(tmp_path_factory.mktemp("zygote") / "log") as forks:
            yield forks


@pytest.fixture
def begun(forks, tmp_path):
    """Starts runs."""
    return lambda num_requests, **more: Chaos(forks, num_requests, 1, tmp_path, **more)


@pytest.mark.slow
def test_handoffs_between_engines_that_are_attacked_break_no_promise(begun):
    outcomes = begun(80).run()
    assert outcomes.is_clean, outcomes.failures
    assert outcomes.requests == outcomes.answered + outcomes.aborted_by_client == 80
    assert outcomes.full
    assert outcomes.killed + outcomes.stopped + outcomes.cut + outcomes.stalled


@pytest.mark.slow
def test_wrong_tokens_and_an_engine_that_dies_by_itself_are_reported(begun):
    chaos = begun(1, settings={"sampled_offset": 1}, has_faults=False)
    attack = chaos._attack

    def attack_and_end():
        attack()
        chaos._decode[0].signal(signal.SIGKILL)

    chaos._attack = attack_and_end
    outcomes = chaos.run()
    assert outcomes.wrong
    assert outcomes.dead
    assert not outcomes.is_clean


class Engine:
    """An engine of which its clients and its counters tell."""

    name, past_results = "decode0", Counter()

    def __init__(self, results, num_answered, num_aborted):
        self.results, self.num_answered, self.num_aborted = Counter(results), num_answered, num_aborted


HELD = {"descriptors": 9, "threads": 3, "bytes": 0, "lost_blocks": 0}


def compared(after=None, *, full=3, num_answered=2, num_aborted=1, through="_decode"):
    """Outcomes of a run whose engine had this at its end."""
    chaos = Chaos(None, 0, 1, ".")
    chaos._engines, chaos._decode, chaos._stored = [Engine({}, num_answered, num_aborted)], [], []
    setattr(chaos, through, chaos._engines)
    at_end = HELD | {"results": {"full": full}} | (after or {})
    chaos._compare({"decode0": HELD}, {"decode0": at_end})
    return chaos.outcomes


@pytest.mark.parametrize(("through", "full"), [("_decode", 3), ("_stored", 3), ("_stored", 2)])
def test_an_engine_as_before_that_counts_each_handoff_breaks_no_promise(through, full):
    outcomes = compared(through=through, full=full)
    assert outcomes.is_clean
    assert outcomes.full == full


@pytest.mark.parametrize(
    "after",
    [
        {"lost_blocks": 1},
        {"threads": 4},
        {"descriptors": 9 + run.MORE_DESCRIPTORS + 1},
        {"bytes": run.MORE_BYTES + 1},
    ],
)
def test_more_than_an_engine_held_before_breaks_a_promise(after):
    assert compared(after).leaked


@pytest.mark.parametrize(("through", "full"), [("_decode", 2), ("_decode", 4), ("_stored", 1), ("_stored", 4)])
def test_a_handoff_that_an_engine_does_not_count_breaks_a_promise(through, full):
    assert compared(through=through, full=full).uncounted


def test_an_answer_of_a_killed_engine_that_it_has_not_counted_breaks_a_promise():
    chaos = Chaos(None, 0, 1, ".")
    chaos._decode = [Engine({"full": 1}, 2, 0)]
    chaos._check_results(chaos._decode[0], is_at_rest=False)
    assert chaos.outcomes.uncounted


def test_shared_memory_is_named_and_that_of_a_living_process_is_known():
    memory = SharedMemory(f"kvpipe-test-{os.getpid()}", create=True, size=100)
    try:
        assert memory.name in run.shared_memory()
        assert memory.name in run.mapped()
        memory.close()
        assert memory.name in run.shared_memory() - run.mapped()
    finally:
        memory.unlink()


# --- the wire


@pytest.fixture
def port():
    ports = free_ports(1)
    yield ports[0]
    release_ports(ports)


def echo(listener):
    """Sends back what comes on each connection."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            while chunk := connection.recv(100):
                connection.sendall(chunk)


@pytest.fixture
def wire(port):
    """A relay before a server that answers with what it has got, and a connection through it."""
    with socket.create_server((HERE, port)) as listener, Relay([port], random.Random(1)) as relay:
        thread = threading.Thread(target=echo, args=(listener,))
        thread.start()
        with socket.create_connection((RELAYED, port), timeout=10) as connection:
            yield relay, connection
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_wire_passes_bytes_on_and_flips_one_bit_of_a_chunk_when_told_to(wire, port):
    relay, connection = wire
    connection.sendall(b"hello")
    assert connection.recv(100) == b"hello"
    relay.flip([port], 1)
    connection.sendall(b"hello")
    changed = connection.recv(100)
    assert sum((a ^ b).bit_count() for a, b in zip(changed, b"hello", strict=True)) == 1
    assert relay.num_flipped == 1


def test_a_stalled_wire_passes_nothing_on_until_it_goes_on(wire, port):
    relay, connection = wire
    relay.stall([port], is_stalled=True)
    connection.sendall(b"hello")
    connection.settimeout(0.2)
    with pytest.raises(TimeoutError):
        connection.recv(100)
    connection.settimeout(10)
    relay.stall([port], is_stalled=False)
    assert connection.recv(100) == b"hello"


def test_a_cut_wire_ends_its_connections(wire, port):
    relay, connection = wire
    connection.sendall(b"hello")
    assert connection.recv(100) == b"hello"
    relay.cut([port])
    assert connection.recv(100) == b""
