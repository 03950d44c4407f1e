"""A stand-in for llm-d's routing sidecar, a Go program that no package has: it sends what that sends.

The sidecar is in the pod of a decode instance. llm-d's router (the endpoint picker behind a gateway) chooses both
instances, and names the prefill instance to the sidecar in a header. Here the choice is an argument.

Source: llm-d/llm-d-router, `pkg/sidecar/proxy`: `disaggregatedPrefillHandler`, `handleNIXLV2`, `decodeRequestBody`,
`cached_tokens_usage_rewriter.go`; `pkg/common/request`: `CapSingleToken`; as of 0545789 and 0d9808e. Left out: tracing,
several candidates, retries (off by default), MoRI-IO, peer-to-peer pulls.
"""

import argparse
import http
import json
import uuid
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

PREFILLER = "x-prefiller-host-port"
REQUEST_ID = "x-request-id"
HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "host", "content-length"}
TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
LIMITS = {"/v1/completions": ("max_tokens",), "/v1/chat/completions": ("max_tokens", "max_completion_tokens")}


class Sidecar:
    """Answers a request by a handoff from the prefill instance that was picked to the decode instance of the pod.

    Args:
        decode: URL of the decode instance.
        picked: `host:port` of the prefill instance.
    """

    def __init__(self, decode: str, picked: str) -> None:
        self._decode, self._picked = decode, picked

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        headers = _forwarded(request.headers)
        # The picker replaces what a client sends, and the sidecar passes it on to no instance.
        headers.pop(PREFILLER, None)
        # Added to one that the client sent: the instances get both.
        headers.add(REQUEST_ID, str(uuid.uuid1()))
        body = await request.json()
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            first = _first(request.path, body)
            asked = session.post(f"http://{self._picked}{request.path}", data=first, headers=headers)
            try:
                async with asked as answer:
                    payload = await answer.read()
                    if not answer.ok:
                        return web.Response(status=answer.status, body=payload, headers=_forwarded(answer.headers))
            except aiohttp.ClientConnectionError as error:
                return web.json_response({"error": str(error)}, status=http.HTTPStatus.BAD_GATEWAY)
            produced = json.loads(payload)
            # An answer without them is logged, and null is passed on.
            params = produced.get("kv_transfer_params")
            data = _marshalled(body | {"kv_transfer_params": params})
            async with session.post(self._decode + request.path, data=data, headers=headers) as answer:
                response = web.StreamResponse(status=answer.status, headers=_forwarded(answer.headers))
                await response.prepare(request)
                num_cached = _cached_tokens(produced)
                if answer.content_type == "text/event-stream":
                    async for line in answer.content:
                        await response.write(_rewritten_event(line, num_cached))
                else:
                    await response.write(_rewritten(await answer.read(), num_cached))
                return response


def _forwarded(headers: Any) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in HOP_BY_HOP)


def _first(path: str, body: dict[str, Any]) -> bytes:
    """The body for prefill: one token, not streamed."""
    capped = body | {"kv_transfer_params": TO_PREFILL, "stream": False} | dict.fromkeys(LIMITS[path], 1)
    return _marshalled({name: value for name, value in capped.items() if name not in {"min_tokens", "stream_options"}})


def _marshalled(body: dict[str, Any]) -> bytes:
    """Go sorts the keys of a map; what is inside of a field that it does not look at keeps its order."""
    return json.dumps(dict(sorted(body.items()))).encode()


def _cached_tokens(answer: dict[str, Any]) -> int:
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return details.get("cached_tokens") or 0


def _rewritten(payload: bytes, num_cached: int) -> bytes:
    """The answer with the tokens that prefill had cached, where it has a usage."""
    answer = json.loads(payload)
    usage = answer.get("usage")
    if not usage:
        return payload
    usage["prompt_tokens_details"] = (usage.get("prompt_tokens_details") or {}) | {"cached_tokens": num_cached}
    return json.dumps(answer).encode()


def _rewritten_event(line: bytes, num_cached: int) -> bytes:
    data = line.removeprefix(b"data: ")
    if data == line or b'"usage"' not in data:
        return line
    return b"data: " + _rewritten(data, num_cached) + b"\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--picked", required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    app = web.Application()
    app.router.add_post("/{path:.*}", Sidecar(args.decode, args.picked))
    # When the client leaves, so do the requests to the instances.
    web.run_app(app, host="127.0.0.1", port=args.port, handler_cancellation=True, print=None)
