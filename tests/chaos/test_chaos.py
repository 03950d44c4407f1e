"""A short run of `python -m tests.chaos`, and that it sees what breaks: else its silence means nothing."""

import importlib.util
import random
import signal
import socket
import threading
from dataclasses import fields

import pytest

from kvpipe.launch.ports import free_ports, release_ports
from tests.chaos.counts import RESULTS, Outcomes
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
    """An engine at rest, as its process describes itself."""

    def __init__(self, num_consumed):
        self.name, self.num_consumed = "decode0", num_consumed


def compared(after, num_consumed=3):
    """Outcomes of a run whose engine had this at its end."""
    chaos = Chaos(None, 0, 1, ".")
    chaos._engines = chaos._decode = [Engine(num_consumed)]
    before = {"descriptors": 9, "threads": 3, "bytes": 0, "lost_blocks": 0, "handoffs": {"full": 3}}
    chaos._compare({"decode0": before}, {"decode0": before | after})
    return chaos.outcomes


def test_an_engine_as_before_that_counts_each_handoff_breaks_no_promise():
    assert compared({}).is_clean


@pytest.mark.parametrize(
    ("after", "name"),
    [
        ({"lost_blocks": 1}, "leaked"),
        ({"threads": 4}, "leaked"),
        ({"descriptors": 9 + run.MORE_DESCRIPTORS + 1}, "leaked"),
        ({"bytes": run.MORE_BYTES + 1}, "leaked"),
        ({"handoffs": {"full": 1, "missing": 1}}, "uncounted"),
        ({"handoffs": {"full": 4}}, "uncounted"),
    ],
)
def test_what_an_engine_holds_or_does_not_count_breaks_a_promise(after, name):
    outcomes = compared(after)
    assert getattr(outcomes, name)
    assert not outcomes.is_clean


def test_all_results_of_handoffs_are_counted():
    assert set(RESULTS) <= {each.name for each in fields(Outcomes)}


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
