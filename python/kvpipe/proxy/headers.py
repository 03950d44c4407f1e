"""Headers that the proxy passes through, either way. Pure."""

import re
from collections.abc import Mapping

from multidict import CIMultiDict

HANDOFF = "x-kvpipe-handoff"
# vLLM's header for the data-parallel rank that gets a request.
DATA_PARALLEL_RANK = "x-data-parallel-rank"
# The longest URL, and the longest header, of a request or an answer: more than a browser or a gateway sends.
MAX_LINE_BYTES = 64 << 10

# RFC 9110, section 5.5. aiohttp reads them in an answer, and does not write them.
_CONTROL_CHARACTER = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
# RFC 9110, section 7.6.1: these belong to one connection.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# The proxy writes the body anew and uncompressed, so that it can append an error event after D's last byte. A client's
# rank would go to P and to D alike, and bypass the choice of the instances that work.
_OURS_IN_REQUEST = _HOP_BY_HOP | {
    DATA_PARALLEL_RANK,
    "accept-encoding",
    "content-encoding",
    "content-length",
    "expect",
    "host",
}
# The proxy's own rules hold for browsers (`kvpipe.proxy.cors`); an instance may allow more.
_CORS = {
    "access-control-allow-credentials",
    "access-control-allow-headers",
    "access-control-allow-methods",
    "access-control-allow-origin",
    "access-control-expose-headers",
    "access-control-max-age",
}
_OURS_IN_RESPONSE = _HOP_BY_HOP | _CORS | {"content-length", "date", "server", HANDOFF}


def request_headers(client: Mapping[str, str]) -> CIMultiDict[str]:
    """A client's headers for an instance: credentials, request and trace ids pass through."""
    return _without(client, _OURS_IN_REQUEST)


def headers_for_rank(headers: CIMultiDict[str], rank: int | None) -> CIMultiDict[str]:
    """A request's headers for a data-parallel rank of a server; for the whole server, they are unchanged."""
    return headers if rank is None else CIMultiDict([*headers.items(), (DATA_PARALLEL_RANK, str(rank))])


def response_headers(instance: Mapping[str, str]) -> CIMultiDict[str]:
    """An instance's headers for the client."""
    return _without(instance, _OURS_IN_RESPONSE)


def has_control_character(headers: Mapping[str, str]) -> bool:
    """True if a value has a character that no header may have."""
    return any(map(_CONTROL_CHARACTER.search, headers.values()))


def _without(headers: Mapping[str, str], ours: frozenset[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return CIMultiDict(
        (name, value) for name, value in headers.items() if (lower := name.lower()) not in ours and lower not in named
    )
