"""The smallest router before a prefill and a decode instance. It knows NixlConnector's fields and nothing of kvpipe.

Call it with `python examples/relay.py --prefill http://HOST:PORT --decode http://HOST:PORT --port 8000`.
"""

import argparse

import aiohttp
from aiohttp import web

TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
# What a prefill of one token does not take, or not with these values.
ONE_TOKEN = {"max_tokens": 1, "min_tokens": None, "stream": False, "stream_options": None}


class Relay:
    """Asks prefill for one token, gives decode what prefill's answer says about its KV, and relays decode's answer."""

    def __init__(self, prefill: str, decode: str) -> None:
        self.prefill, self.decode = prefill, decode

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        """Answers a request."""
        body = await request.json()
        first = body | ONE_TOKEN | {"kv_transfer_params": TO_PREFILL}
        if "max_completion_tokens" in body:
            first["max_completion_tokens"] = 1
        first = {name: value for name, value in first.items() if value is not None}
        async with aiohttp.ClientSession() as session:
            async with session.post(self.prefill + request.path, json=first) as answer:
                if not answer.ok:
                    refusal = await answer.read()
                    return web.Response(status=answer.status, body=refusal, content_type=answer.content_type)
                params = (await answer.json())["kv_transfer_params"]
            decode = session.post(self.decode + request.path, json=body | {"kv_transfer_params": params})
            async with decode as answer:
                response = web.StreamResponse(status=answer.status)
                response.content_type = answer.content_type
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                return response


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("prefill", "decode"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    app = web.Application()
    app.router.add_post("/{path:.*}", Relay(args.prefill, args.decode))
    # When the client leaves, so do the requests to the instances.
    web.run_app(app, host="127.0.0.1", port=args.port, handler_cancellation=True, print=None)
