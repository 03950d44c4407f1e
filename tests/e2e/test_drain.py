"""A prefill instance that is stopped as examples/kubernetes stops it: with time to drain."""

import signal
from collections.abc import Iterator

import pytest

from tests.e2e.client import COMPLETIONS, Servers, completion, consume, new_handoff, post, produce, prompt, until
from tests.e2e.groups import LOGS

# Longer than a lease.
DRAIN = ("--shutdown-timeout", "45")


@pytest.fixture
def draining(servers: Servers) -> Iterator[Servers]:
    """The servers with a prefill instance that drains at SIGTERM."""
    child = servers.prefill.child
    command = child.command
    child.command = (*command, *DRAIN)
    servers.kill(servers.prefill)
    servers.restart(servers.prefill)
    yield servers
    child.command = command
    servers.kill(servers.prefill)
    servers.restart(servers.prefill)


def test_a_prefill_that_drains_ends_when_its_handoffs_are_fetched(draining: Servers) -> None:
    child = draining.prefill.child
    handoff, body = new_handoff(), completion(prompt(300, seed=120))
    with post(draining.prefill.url, COMPLETIONS, body | produce(handoff)) as response:
        response.read()
    log = LOGS / "roomy" / f"{child.name}.log"
    begins = log.stat().st_size
    child.send_signal(signal.SIGTERM)
    until(lambda: b"EngineCore: start mode=drain" in log.read_bytes()[begins:])
    expected = draining.expected(COMPLETIONS, body)
    assert b"EngineCore: request processing complete" not in log.read_bytes()[begins:]
    text, _ = draining.answer(draining.decode.url, COMPLETIONS, body | consume(handoff, draining.prefill.control))
    assert text == expected
    result = draining.result(handoff, draining.decode)
    assert (result["result"], result["computed_tokens"]) == ("full", 0)
    until(lambda: not child.is_running)
