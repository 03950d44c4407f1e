"""What `python -m tests.chaos --vllm` reports of answers, processes and counters: else its silence means nothing.

A stand-in breaks here what real proxies and instances must not. Real ones are attacked in the run itself.
"""

import json
import threading
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from bench.processes import SubjectError
from tests.chaos import instances
from tests.chaos.instances import Answers, FrontEnd, InstanceChaos, Target

NUM_REQUESTS = 20  # streams and others, through both proxies


class CutError(Exception):
    """The connection ends before the answer's end."""


@contextmanager
def listening(answer, metrics=""):
    """The address of a server. `answer` gets a request's body, and returns the status and the text of the answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self._send(200, metrics, len(metrics))

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            try:
                status, text = answer(body)
            except CutError:
                self._send(200, "data: ", 100)
                return
            payload = json.dumps({"choices": [{"text": text}]})
            if body["stream"] and status == 200:
                payload = f"data: {payload}\n\ndata: [DONE]\n\n"
            self._send(status, payload, len(payload))

        def _send(self, status, payload, size):
            self.send_response(status)
            self.send_header("content-length", str(size))
            self.end_headers()
            self.wfile.write(payload.encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def right(_body):
    return 200, "the answer"


def cut(_body):
    raise CutError


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Starts runs whose proxies answer so, and whose instances have these metrics."""
    monkeypatch.setattr(instances, "REST_S", 0.0)
    with ExitStack() as stack:

        def begin(answer=right, *, held="", num_counted=0, is_running=True, num_messages=0):
            counted = f"kvpipe_requests_total{{}} {num_counted}\n"
            proxy, instance = (stack.enter_context(listening(*each)) for each in ((answer, counted), (right, held)))
            engine = SimpleNamespace(name="decode0", url=instance, child=SimpleNamespace(is_running=is_running))
            chaos = InstanceChaos(NUM_REQUESTS, 0, tmp_path)
            chaos._deployment = SimpleNamespace(undivided=[engine], prefill=[], decode=[engine])
            chaos._queued = SimpleNamespace(state=lambda: {"queues": {"waiting": {"messages": num_messages}}})
            chaos._direct, chaos._through_broker = FrontEnd(proxy), FrontEnd(proxy)
            return chaos

        yield begin


@pytest.mark.parametrize(
    ("answer", "name"),
    [
        pytest.param(right, "answered", id="right"),
        pytest.param(lambda _: (200, "another answer"), "wrong", id="another"),
        pytest.param(lambda _: (503, "no instance"), "failed_with_an_error", id="error"),
        pytest.param(cut, "late", id="cut"),
    ],
)
def test_each_answer_of_a_proxy_is_one_count(begun, answer, name):
    chaos = begun(answer)
    for number in range(NUM_REQUESTS):
        chaos._request(number)
    answers = chaos.answers
    assert answers.requests == getattr(answers, name) == NUM_REQUESTS
    assert answers.is_clean == (name not in Answers.VIOLATIONS)
    assert bool(answers.answered_through_the_broker) == (name == "answered")


def test_a_request_whose_proxy_is_killed_is_asked_again(begun):
    killed = []

    def answer(body):
        if killed:
            return right(body)
        killed.append(body)
        for name in ("proxy", "queue-proxy"):
            with chaos._without_requests(SimpleNamespace(name=name)):
                pass
        raise CutError

    chaos = begun(answer)
    chaos._request(0)
    assert killed
    assert chaos.answers.lost_with_killed_proxy == chaos.answers.answered == 1
    assert chaos.answers.is_clean


def test_calm_instances_and_proxies_break_no_promise(begun):
    chaos = begun(num_counted=1)
    chaos._direct.num_ended = chaos._through_broker.num_ended = 1
    chaos._visit()
    chaos._direct.num_ended = chaos._through_broker.num_ended = 1
    chaos._rest()
    assert chaos.answers.is_clean, chaos.answers.failures


@pytest.mark.parametrize(
    ("found", "name"),
    [
        pytest.param({"held": "vllm:kv_cache_usage_perc{} 0.01\n"}, "leaked", id="blocks"),
        pytest.param({"num_messages": 1}, "leaked", id="messages"),
        pytest.param({"num_counted": 1}, "uncounted", id="a request that none has sent"),
        pytest.param({"is_running": False}, "dead", id="an instance that has ended"),
    ],
)
def test_what_is_left_after_the_last_request_breaks_a_promise(begun, found, name):
    chaos = begun(**found)
    chaos._rest()
    assert getattr(chaos.answers, name) > 0
    assert not chaos.answers.is_clean


def test_a_proxy_that_answers_otherwise_after_all_faults_breaks_a_promise(begun):
    chaos = begun(lambda _: (503, "no instance"))
    chaos._visit()
    assert chaos.answers.unrecovered == 2


def test_a_process_that_ends_by_itself_and_one_that_does_not_start_again_break_a_promise(begun, monkeypatch):
    monkeypatch.setattr(instances, "LONGEST_PAUSE_S", 0.0)
    monkeypatch.setattr(instances, "BOUND_S", 0.0)  # a fault waits for no request

    def refuse():
        chaos._is_over = True
        raise SubjectError("the port is taken")

    chaos = begun()
    chaos._targets = lambda: [Target("decode0", lambda: False, refuse, lambda _: None)]
    chaos._make_faults()
    assert chaos.answers.dead > 0
    assert chaos.answers.unrecovered == 1
