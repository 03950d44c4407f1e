"""Request bodies for P and D, made from the client's body. Pure."""

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import orjson

from kvpipe import transfer_params
from kvpipe.exceptions import KVPipeError
from kvpipe.proxy import exact_json

COMPLETIONS_PATH = "/v1/completions"
CHAT_PATH = "/v1/chat/completions"
PARAMS = "kv_transfer_params"
_FIRST_ERROR, _LAST_ERROR = 400, 599
_ERROR_EVENT = b'data: {"error"'
_MAX_ERROR_BYTES = 1 << 16


class BodyError(KVPipeError, ValueError):
    """The client's body is not a JSON object, or cannot be passed on as it is."""


class OpaqueBody(dict[str, Any]):
    """A body that is no JSON: without fields, and passed on as it came.

    Attributes:
        raw: its bytes.
    """

    def __init__(self, raw: bytes) -> None:
        super().__init__()
        self.raw = raw


def parse_body(raw: bytes) -> dict[str, Any]:
    """Parse a client's body, and remove its transfer parameters.

    These decide which memory D reads, so only the proxy may set them. `vllm_xargs` can carry them too, because vLLM
    merges both into `SamplingParams.extra_args`.

    Raises:
        BodyError: not JSON, not an object, or it cannot be passed on as it is.
    """
    try:
        body = exact_json.read(raw)
    except ValueError as error:
        raise BodyError(f"request body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BodyError(f"request body must be a JSON object, not {type(body).__name__}")
    body.pop(PARAMS, None)
    if isinstance(xargs := body.get("vllm_xargs"), dict):
        xargs.pop(PARAMS, None)
    return body


def prefill_body(body: dict[str, Any], path: str, params: dict[str, Any]) -> bytes:
    """Body for P: the client's request, limited to its first token, not streamed, with these transfer parameters."""
    changed = {key: value for key, value in body.items() if key != "stream_options"}
    changed |= {"max_tokens": 1, "n": 1, "stream": False}
    if path == CHAT_PATH:  # vLLM's completions protocol lacks this field
        changed["max_completion_tokens"] = 1
    if isinstance(min_tokens := body.get("min_tokens"), int):
        changed["min_tokens"] = min(1, min_tokens)
    return written(changed | {PARAMS: params})


def decode_body(body: dict[str, Any], handoff: str, producer: str) -> bytes:
    """Body for D: the client's request, consuming `handoff` from the control port `producer`."""
    return written(body | {PARAMS: transfer_params.consume(handoff, producer)})


def loading_body(body: dict[str, Any], handoff: str, first_token: int | None) -> bytes:
    """Body for D: the client's request, loading from the store what P has saved for `handoff`."""
    return written(body | {PARAMS: transfer_params.load(handoff, first_token)})


def resumed_body(body: dict[str, Any], handoff: str, tokens: Sequence[int]) -> bytes:
    """Body for a D that continues alone after the tokens that the client has; `handoff` is a new id."""
    return written(body | {PARAMS: transfer_params.resume(handoff, tokens)})


def plain_body(body: dict[str, Any]) -> bytes:
    """Body for a D that works alone, without a handoff."""
    return body.raw if isinstance(body, OpaqueBody) else written(body)


def written(body: dict[str, Any]) -> bytes:
    """Writes a body.

    Raises:
        BodyError: it is nested deeper than JSON is written here.
    """
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise BodyError(f"request body cannot be passed on: {error}") from error


def may_begin_with_error(first: bytes) -> bool:
    """True if the first bytes of a stream may be a part of an event with an error."""
    is_open = b"\n\n" not in first and len(first) < _MAX_ERROR_BYTES
    return is_open and (first.startswith(_ERROR_EVENT) or _ERROR_EVENT.startswith(first))


def error_in_first_event(first: bytes) -> tuple[int, bytes] | None:
    """Status and JSON body of an error that is the first event of these bytes; None if they begin with anything else.

    vLLM answers 200 before the engine has accepted a streamed request, and sends a later error as an event.
    """
    data = first.partition(b"\n\n")[0].removeprefix(b"data:").strip()
    if not data.startswith(b'{"error"'):
        return None
    try:
        error = orjson.loads(data)["error"]
    except orjson.JSONDecodeError:
        return None
    code = error.get("code") if isinstance(error, dict) else None
    if isinstance(code, int) and _FIRST_ERROR <= code <= _LAST_ERROR:
        return code, data
    return HTTPStatus.INTERNAL_SERVER_ERROR, data


def error_body(status: HTTPStatus, message: str) -> bytes:
    """An error in OpenAI's form, as vLLM writes it."""
    kind = status.phrase.title().replace(" ", "") + "Error"  # BadRequestError, NotFoundError, …
    error = {"message": message, "type": kind, "param": None, "code": status}
    return orjson.dumps({"error": error})
