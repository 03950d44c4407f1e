"""The tokens of all stand-ins, whose engines therefore agree."""

import zlib
from array import array
from collections.abc import Sequence


def following(tokens: Sequence[int], num_tokens: int, seed: int | None = None) -> list[int]:
    """An answer of `num_tokens` tokens to these; each seed has another one."""
    sum_ = zlib.crc32(array("q", tokens).tobytes(), seed or 0)
    answer = []
    for _ in range(num_tokens):
        answer.append(10 + sum_ % 1990)
        sum_ = zlib.crc32(array("q", answer[-1:]).tobytes(), sum_)
    return answer
