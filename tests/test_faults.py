"""A round of each fault of `make faults` at each stage."""

import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.faults.__main__ import main
from tests.faults.forked import Forked
from tests.faults.rounds import FAULTS
from tests.faults.stages import Place, serving_blocks
from tests.hosts.namespaces import why_no_hosts
from tests.peers import ROOT

pytestmark = pytest.mark.ucx

FEW = ("--rounds", "1", "--warm-up", "0", "--seed", "1")

both_roads = pytest.mark.parametrize("road", ["default", "tcp"])


@pytest.fixture
def strike(monkeypatch, capsys):
    """Does a round at each stage. Fails when the survivor knew too late, or when something is left behind."""
    monkeypatch.setenv("UCX_TLS", "")  # put back afterwards; main() sets it by road

    def begin(fault, road):
        status = main([*FEW, "--faults", fault, "--roads", road])
        assert status == 0, capsys.readouterr().out

    return begin


@both_roads
def test_a_peer_that_is_killed_at_any_stage_is_noticed_in_time_and_leaves_nothing_behind(strike, road):
    strike("kill", road)


@both_roads
def test_a_deadline_holds_when_the_peer_is_stopped_at_any_stage_and_one_that_goes_on_is_reached_again(strike, road):
    strike("stop", road)


@pytest.mark.slow
def test_servers_of_blocks_that_are_stopped_while_they_send_over_tcp_survive_that_both_sides_close():
    """Of 300 that closed at once a twentieth crashed in UCX 1.22."""
    num_threads, num_stops = 8, 20

    def stop_servers(seed):
        rng = random.Random(seed)
        for _ in range(num_stops):
            FAULTS["stop"].strike(serving_blocks, rng, Place(start=Forked))

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(num_threads) as threads:
        patch.setenv("UCX_TLS", "tcp")
        list(threads.map(stop_servers, range(num_threads)))


@pytest.mark.skipif(bool(why_no_hosts()), reason=why_no_hosts())
def test_a_deadline_holds_when_the_network_is_cut_at_any_stage_and_the_peer_is_reached_again_afterwards():
    # In a process of its own: see tests/hosts/namespaces.py.
    command = [sys.executable, "-m", "tests.faults", *FEW, "--faults", "partition", "--roads", "tcp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@both_roads
def test_a_server_that_was_killed_and_started_again_is_reached_again_from_the_same_process(strike, road):
    strike("restart", road)


def test_garbage_on_a_port_keeps_nobody_out(strike):
    strike("garbage", "default")


@both_roads
def test_a_slow_receiver_slows_its_sender_and_gets_everything_in_order(strike, road):
    strike("slow", road)


@both_roads
def test_inserts_into_a_full_buffer_whose_consumer_fails_end_in_time_and_go_on_once_there_is_place(strike, road):
    strike("full", road)
