"""Reads JSON as vLLM's server does, and keeps each value as the client has written it. Pure.

vLLM reads a body with Python's `json`: in UTF-8, UTF-16 or UTF-32, with or without a byte order mark, with integers of
any length, and with NaN and Infinity. orjson is faster, but refuses or changes these: then `json` reads the body. A
number that orjson cannot write is an `orjson.Fragment`, which it writes as it came.
"""

import json
import math
from typing import Any

import orjson

_ALL_ZEROS = bytes.maketrans(b"123456789", b"000000000")
# orjson reads integers outside of 64 bits, which have 19 digits or more, as floats.
_LONG_INTEGER = b"0" * 19
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_MOST_DIGITS = len(str(_MOST))


def read(raw: bytes) -> Any:
    """Returns the value; `orjson.dumps` writes it, unless it is nested deeper than orjson writes.

    Raises:
        ValueError: it is no JSON, nested too deep, or has a string that is no Unicode, which no tokenizer takes.
    """
    if _LONG_INTEGER not in raw.translate(_ALL_ZEROS):
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            pass
    try:
        value = json.loads(raw, parse_int=_integer, parse_float=_float, parse_constant=orjson.Fragment)
    except RecursionError as error:
        message = "it is nested too deep"
        raise ValueError(message) from error
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ValueError(str(error)) from error
    return value


def _integer(digits: str) -> int | orjson.Fragment:
    if len(digits) > _MOST_DIGITS or not _LEAST <= int(digits) <= _MOST:
        return orjson.Fragment(digits)
    return int(digits)


def _float(digits: str) -> float | orjson.Fragment:
    """A number beyond the largest float is infinite in Python, and none in JSON."""
    value = float(digits)
    return value if math.isfinite(value) else orjson.Fragment(digits)
