"""What is asked, and when: a pure function of seed, rate, number of requests and mix."""

from __future__ import annotations

import random
from dataclasses import dataclass

from bench.instances.model import random_prompt
from kvpipe.exceptions import ConfigError


@dataclass(frozen=True)
class Mix:
    """Lengths of prompts and of outputs in tokens: the least and the most of each, drawn evenly."""

    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest request."""
        return self.prompt_tokens[1] + self.output_tokens[1]


MIXES = {
    "mixed": Mix((128, 1024), (32, 256)),
    "decode-heavy": Mix((256, 256), (256, 256)),
    "parity": Mix((128, 128), (8, 8)),
}


def parse_range(option: str, text: str) -> tuple[int, int]:
    """Parses `LO:HI`, or one number for both.

    Raises:
        ConfigError: It is no such range.
    """
    low, _, high = text.partition(":")
    try:
        found = int(low), int(high or low)
    except ValueError:
        found = (0, 0)
    if not 1 <= found[0] <= found[1]:
        message = f"{option} {text}: expected LO:HI with 1 <= LO <= HI, such as 128:1024"
        raise ConfigError(message)
    return found


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        number: Its place in the workload, from 0.
        at_s: When it is sent, from the beginning.
        num_prompt: Tokens of its prompt.
        num_output: Tokens that it asks for.
    """

    number: int
    at_s: float
    num_prompt: int
    num_output: int


@dataclass(frozen=True)
class Workload:
    """Requests of a Poisson process.

    Attributes:
        seed: Seed of arrivals, lengths and prompts.
        rate: Requests/s; infinite when all are sent at once.
        requests: The requests by arrival.
    """

    seed: int
    rate: float
    requests: tuple[Request, ...]

    @classmethod
    def draw(cls, seed: int, rate: float, num_requests: int, mix: Mix) -> Workload:
        """Draws a workload. Rates differ only in the scale of time.

        Given their number, the arrivals of a Poisson process are even in its time: so the rate is exact.
        """
        arrivals = random.Random(f"arrivals {seed} {num_requests}")  # noqa: S311 - no secret
        lengths = random.Random(f"lengths {seed}")  # noqa: S311 - no secret
        places = sorted(arrivals.random() for _ in range(num_requests))
        requests = [
            Request(
                number,
                place * num_requests / rate,
                lengths.randint(*mix.prompt_tokens),
                lengths.randint(*mix.output_tokens),
            )
            for number, place in enumerate(places)
        ]
        return cls(seed, rate, tuple(requests))

    @property
    def window_s(self) -> float:
        """Seconds in which requests arrive."""
        return len(self.requests) / self.rate

    @property
    def num_output(self) -> int:
        """Tokens that all requests ask for."""
        return sum(request.num_output for request in self.requests)

    def prompt(self, request: Request, use: str) -> list[int]:
        """Token ids of a request's prompt; each `use` of the workload has others, so that no prefix cache helps."""
        return random_prompt(request.num_prompt, f"{self.seed} {use} {request.number}")
