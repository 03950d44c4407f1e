"""Reads JSON as vLLM's server does, and keeps each value as the client has written it. Pure.

vLLM reads a body with Python's `json`: in UTF-8, UTF-16 or UTF-32, with or without a byte order mark, with integers of
any length, and with NaN and Infinity. orjson is faster, but refuses or changes these: then `json` reads the body. A
number that orjson cannot write is an `orjson.Fragment`, which it writes as it came. Only a body with such a number
costs a call for each of its numbers.
"""

import json
import math
import re
from typing import Any

import orjson

_ALL_ZEROS = bytes.maketrans(b"123456789", b"000000000")
# orjson reads integers outside of 64 bits, which have 19 digits or more, as floats.
_LONG_INTEGER = b"0" * 19
_LEAST, _MOST = -(1 << 63), (1 << 64) - 1
_MOST_DIGITS = len(str(_MOST))
# A string, or an open one at the end, in time that is linear in the text.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_MAY_BE_LONG = re.compile(r"(?<![.\deE+])-?\d{19,}+(?![.eE])", re.ASCII)
# The largest float has 309 digits, with those that an exponent stands for.
_MAY_BE_INFINITE = re.compile(r"[eE]\+?\d{3}|\d{200}", re.ASCII)


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
        text = raw.decode(json.detect_encoding(raw), "surrogatepass")  # as `json.loads`
        numbers = _STRING.sub('"', text)
        value = json.loads(
            text,
            parse_int=_integer if any(map(_is_long, _MAY_BE_LONG.findall(numbers))) else None,
            parse_float=_float if _MAY_BE_INFINITE.search(numbers) else None,
            parse_constant=orjson.Fragment,
        )
    except RecursionError as error:
        message = "it is nested too deep"
        raise ValueError(message) from error
    try:
        orjson.dumps(value)
    except orjson.JSONEncodeError as error:
        raise ValueError(str(error)) from error
    return value


def _integer(digits: str) -> int | orjson.Fragment:
    return orjson.Fragment(digits) if _is_long(digits) else int(digits)


def _is_long(digits: str) -> bool:
    """True for an integer outside of 64 bits."""
    return len(digits) > _MOST_DIGITS or not _LEAST <= int(digits) <= _MOST


def _float(digits: str) -> float | orjson.Fragment:
    """A number beyond the largest float is infinite in Python, and none in JSON."""
    value = float(digits)
    return value if math.isfinite(value) else orjson.Fragment(digits)
