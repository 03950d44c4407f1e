"""A few rounds of `make faults`."""

import pytest

from tests.faults.__main__ import main

pytestmark = pytest.mark.ucx


@pytest.mark.parametrize("road", ["default", "tcp"])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_a_peer_that_fails_at_any_stage_is_noticed_in_time_and_leaves_nothing_behind(fault, road, monkeypatch, capsys):
    monkeypatch.setenv("UCX_TLS", "")  # put back afterwards; main() sets it by road
    status = main(["--rounds", "1", "--seed", "1", "--faults", fault, "--roads", road])
    assert status == 0, capsys.readouterr().out
