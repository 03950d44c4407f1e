"""The client of the benchmark: sends one request at a time, and measures it by the clock of the trace."""

from __future__ import annotations

import http.client
import json
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from bench.instances.vllm import MODEL
from bench.processes import SubjectError, requests_to

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from bench.instances.servers import Server

OUTPUT_TOKENS = 4
_LIMIT_S = 180


@dataclass(frozen=True)
class Streamed:
    """Times of a streamed answer, in seconds of `time.monotonic`: the request, and each piece of text."""

    asked_s: float
    texts_s: list[float]
    headers: Mapping[str, str]


def _body(tokens: list[int], more: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "prompt": tokens, "temperature": 0, "ignore_eos": True, **more}


def _post(url: str, body: dict[str, Any], headers: Mapping[str, str]) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_LIMIT_S)
    # A response that closes the connection owns it.
    own = {"Content-Type": "application/json", "Connection": "close"}
    connection.request("POST", "/v1/completions", json.dumps(body), own | dict(headers))
    response = connection.getresponse()
    if response.status != http.HTTPStatus.OK:
        message = f"{url} answered {response.status}: {response.read()[:300]!r}"
        raise SubjectError(message)
    return response


def stream(url: str, tokens: list[int], headers: Mapping[str, str] | None = None, **more: Any) -> Streamed:
    """Streams a completion until its end.

    Raises:
        SubjectError: There is no answer, it is an error, or it has fewer than two pieces of text.
    """
    asked_s = time.monotonic()
    body = _body(tokens, {"max_tokens": OUTPUT_TOKENS, "stream": True, **more})
    with requests_to(url):
        response = _post(url, body, headers or {})
        texts_s = list(_texts_s(response))
    if len(texts_s) < 2:  # noqa: PLR2004 - first and second token
        message = f"{url}: a stream of {len(texts_s)} pieces of text"
        raise SubjectError(message)
    return Streamed(asked_s, texts_s, dict(response.headers))


def tokens_s(url: str, tokens: list[int], max_tokens: int) -> Iterator[float]:
    """Yields the time of each piece of text of a stream as it comes; closing the iterator ends the stream.

    Raises:
        SubjectError: The answer is an error.
    """
    with _post(url, _body(tokens, {"max_tokens": max_tokens, "stream": True}), {}) as response:
        yield from _texts_s(response)


def _texts_s(response: http.client.HTTPResponse) -> Iterator[float]:
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if any(choice["text"] for choice in event.get("choices", ())):
                yield time.monotonic()


def prefill(url: str, tokens: list[int], headers: Mapping[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """Requests one token, and returns the answer."""
    answer: dict[str, Any] = json.loads(_post(url, _body(tokens, {"max_tokens": 1, **more}), headers or {}).read())
    return answer


@dataclass
class CpuClock:
    """Samples a server's CPU time during a request: a context manager with its own thread."""

    server: Server
    readings: list[tuple[float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Starts nothing."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._is_over.wait(0.02):
            self.readings.append((time.monotonic(), self.server.cpu_s()))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def share(self, from_s: float, to_s: float) -> float | None:
        """Returns the share of a CPU between two times in per cent; `None` if there are too few samples."""
        inside = [reading for reading in self.readings if from_s <= reading[0] <= to_s]
        if len(inside) < 2:  # noqa: PLR2004 - a difference
            return None
        (first_s, first), (last_s, last) = inside[0], inside[-1]
        return 100 * (last - first) / (last_s - first_s)
