"""A round of each fault of `make faults` at each stage."""

import contextlib
import random
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kvpipe import KVPipeError, Pipe
from tests.faults.__main__ import main
from tests.faults.forked import Forked
from tests.faults.rounds import FAULTS
from tests.faults.stages import Place, _open, serving_blocks
from tests.hosts.namespaces import why_no_hosts
from tests.peers import MIB, ROOT

pytestmark = pytest.mark.ucx

FEW = ("--rounds", "1", "--warm-up", "0", "--seed", "1")

both_data_paths = pytest.mark.parametrize("data_path", ["default", "tcp"])


@pytest.fixture
def strike(monkeypatch, capsys):
    """Does a round at each stage. Fails when the survivor knew too late, or when something is left behind."""
    monkeypatch.setenv("KVPIPE_DATA_PATH", "")  # put back afterwards; main() sets it by data path

    def begin(fault, data_path):
        status = main([*FEW, "--faults", fault, "--data-paths", data_path])
        assert status == 0, capsys.readouterr().out

    return begin


@pytest.mark.slow
@both_data_paths
def test_a_peer_that_is_killed_at_any_stage_is_noticed_in_time_and_leaves_nothing_behind(strike, data_path):
    strike("kill", data_path)


@pytest.mark.slow
@both_data_paths
def test_a_deadline_holds_when_the_peer_is_stopped_at_any_stage_and_one_that_goes_on_is_reached_again(
    strike, data_path
):
    strike("stop", data_path)


@pytest.mark.slow
def test_servers_of_blocks_that_are_stopped_while_they_send_over_tcp_survive_that_both_sides_close(monkeypatch):
    """Over UCX's TCP, which is not used any more, a twentieth of 300 crashed."""
    monkeypatch.setenv("KVPIPE_DATA_PATH", "tcp")
    num_threads, num_stops = 8, 20

    def stop_servers(seed):
        rng = random.Random(seed)
        for _ in range(num_stops):
            FAULTS["stop"].strike(serving_blocks, rng, Place(start=Forked))

    with ThreadPoolExecutor(num_threads) as threads:
        list(threads.map(stop_servers, range(num_threads)))


@pytest.mark.slow
def test_what_a_sender_has_back_after_a_late_send_and_a_close_is_not_delivered_changed(monkeypatch):
    """Memory is sent as it lies, and without checksums, which would detect the change.

    The sender survives it too.
    """
    monkeypatch.setenv("KVPIPE_DATA_PATH", "tcp")
    num_threads, num_rounds, num_bytes = 4, 25, 3 * MIB

    def change_what_is_sent(seed):
        rng = random.Random(seed)
        delivered = []
        for _ in range(num_rounds):
            child = Forked("receive_into", num_bytes)
            try:
                with _open(Pipe.connect(child.read(), integrity="none")) as sender:
                    tensor = np.ones(num_bytes, np.uint8)
                    sender.send_tensor(tensor, timeout=20)
                    assert child.read() == "1"
                    stops = threading.Timer(rng.uniform(0, 0.004), child.process.send_signal, (signal.SIGSTOP,))
                    stops.start()
                    with contextlib.suppress(KVPipeError):
                        sender.send_tensor(tensor, timeout=0.1)
                    with contextlib.suppress(KVPipeError):
                        sender.close(timeout=0.02)  # a late send is settled when its session has ended
                    tensor.fill(2)
                    stops.join()
                    child.process.send_signal(signal.SIGCONT)
                    delivered.append(child.read())
            finally:
                child.end()
        return delivered

    with ThreadPoolExecutor(num_threads) as threads:
        delivered = [each for all_ in threads.map(change_what_is_sent, range(num_threads)) for each in all_]
    assert {"1", "over"} == set(delivered)


@pytest.mark.slow
@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_a_deadline_holds_when_the_network_is_cut_at_any_stage_and_the_peer_is_reached_again_afterwards():
    # In a process of its own: see tests/hosts/namespaces.py.
    command = [sys.executable, "-m", "tests.faults", *FEW, "--faults", "partition", "--data-paths", "tcp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@both_data_paths
def test_a_server_that_was_killed_and_started_again_is_reached_again_from_the_same_process(strike, data_path):
    strike("restart", data_path)


def test_garbage_on_a_port_keeps_no_peer_out(strike):
    strike("garbage", "default")


@both_data_paths
def test_a_slow_receiver_slows_its_sender_and_gets_everything_in_order(strike, data_path):
    strike("slow", data_path)


@both_data_paths
def test_inserts_into_a_full_buffer_whose_consumer_fails_end_in_time_and_go_on_once_there_is_place(strike, data_path):
    strike("full", data_path)
