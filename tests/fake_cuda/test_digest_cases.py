"""Digests of handoffs on GPUs: more than run at once, divisions and closings meanwhile, kernels that are refused."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.fake_cuda

TIMEOUT_S = 60


def run(library, case):
    command = [sys.executable, "-m", "tests.fake_cuda.digest_cases", library, case]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return ended.stdout.splitlines()


def test_launches_that_are_refused_while_others_wait_hold_up_no_load(library):
    assert run(library, "refused") == ["14", "load_completed"]


def test_blocks_of_any_number_of_chunks_are_copied_and_digested_by_one_launch(library):
    # And one of the producer's for each.
    assert run(library, "chunks") == ["load_completed", "True"] * 3 + ["6"]


def test_blocks_that_are_divided_while_their_digests_are_computed_are_announced_in_more_launches(library):
    assert run(library, "divided") == ["load_completed load_completed", "True", "True"]


def test_the_closing_of_a_region_waits_for_the_digests_of_its_blocks(library):
    assert run(library, "closed") == ["False", "True"]


def test_blocks_are_right_although_their_region_is_closed_while_they_are_copied(library):
    assert run(library, "closed_there") == ["False", "corrupt: 0", "True"]


def test_an_agent_closes_although_a_copy_on_its_gpu_does_not_end(library):
    assert run(library, "stuck") == ["closed"]


def test_a_trace_shows_where_the_time_of_a_copy_between_gpus_goes(library):
    assert run(library, "traced") == ["turn posted moved reported compared", "moved"]


def test_a_kernel_that_does_not_load_is_an_error_where_checksums_were_asked_for(library):
    lines = run(library, "not_loaded")
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("TransportUnavailableError integrity=checksum: this GPU computes no digests of blocks")
        assert "cuModuleGetFunction" in line
