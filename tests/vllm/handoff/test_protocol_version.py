"""A decode engine and a prefill engine that speaks another version of the protocol. Both are real, up to the model."""

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator

import pytest
from vllm.v1.request import RequestStatus

from kvpipe.transfer_params import consume, produce
from kvpipe.vllm.first_token.pending import PENDING_FIRST_TOKENS
from tests.vllm.handoff.computing_engine import LAYERS, HandoffEngine
from tests.vllm.handoff.engine import new_id
from tests.vllm.handoff.test_scheduler import prompt, reported
from tests.vllm.store.engine import answered

pytestmark = pytest.mark.vllm

PROMPT = prompt(100)
EXPECTED = answered(PROMPT, num_layers=len(LAYERS))
OTHER_VERSION = 1
# A control port closes a connection that it refuses.
CLOSES_WITHIN_S = 10


class OtherVersion(socketserver.StreamRequestHandler):
    """A connection to a control port, on which HELLO names another version than its sender has written."""

    timeout = CLOSES_WITHIN_S

    def handle(self) -> None:
        """Passes HELLO on, and what answers it."""
        length = self.rfile.read(4)
        hello = bytearray(self.rfile.read(int.from_bytes(length, "little")))
        # It begins with its type and the magic.
        hello[5:7] = OTHER_VERSION.to_bytes(2, "little")
        with socket.create_connection(self.server.control, CLOSES_WITHIN_S) as control:
            control.sendall(length + hello)
            while answer := control.recv(1 << 16):
                self.wfile.write(answer)


@pytest.fixture
def new_engine(tiny_model: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., HandoffEngine]]:
    """Makes engines that compute; arguments are settings of the connector."""
    monkeypatch.setattr(PENDING_FIRST_TOKENS, "has_processor", True)
    engines = []

    def make(**settings: str) -> HandoffEngine:
        engines.append(HandoffEngine(tiny_model, **settings))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def producer(new_engine: Callable[..., HandoffEngine]) -> HandoffEngine:
    """The prefill engine."""
    return new_engine()


@pytest.fixture
def other_version(producer: HandoffEngine) -> Iterator[str]:
    """An address of the prefill engine at which it speaks another version than those who connect there."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), OtherVersion) as server:
        host, _, port = producer.address.rpartition(":")
        server.control = host, int(port)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield "{}:{}".format(*server.server_address)
        server.shutdown()
        thread.join()


def produced(producer: HandoffEngine) -> str:
    """A handoff that the prefill engine has computed."""
    handoff = new_id()
    producer.answer(PROMPT, 1, params=produce(handoff))
    return handoff


def test_without_another_version_the_kv_is_handed_over(
    new_engine: Callable[..., HandoffEngine], producer: HandoffEngine
) -> None:
    decode, handoff = new_engine(), produced(producer)
    assert decode.answer(PROMPT, params=consume(handoff, producer.address)) == EXPECTED
    assert reported(decode, handoff)["result"] == "full"


def test_another_version_is_refused_by_name_and_decode_computes_the_right_tokens(
    new_engine: Callable[..., HandoffEngine], producer: HandoffEngine, other_version: str
) -> None:
    decode, handoff = new_engine(), produced(producer)
    assert decode.answer(PROMPT, params=consume(handoff, other_version)) == EXPECTED
    result = reported(decode, handoff)
    assert (result["result"], result["computed_tokens"]) == ("missing", len(PROMPT))
    assert f'protocol version is "{OTHER_VERSION}" here and ' in result["reason"]


def test_with_on_load_failure_fail_a_request_of_another_version_fails_and_its_result_names_it(
    new_engine: Callable[..., HandoffEngine], producer: HandoffEngine, other_version: str
) -> None:
    decode, handoff = new_engine(on_load_failure="fail"), produced(producer)
    request = decode.add(PROMPT, params=consume(handoff, other_version))
    decode.until(request.is_finished)
    assert request.status == RequestStatus.FINISHED_ERROR
    assert not decode.answers.get(request.request_id)
    result = reported(decode, handoff)
    assert result["result"] == "failed"
    assert f'protocol version is "{OTHER_VERSION}" here and ' in result["reason"]
