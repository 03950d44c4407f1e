"""Token by token the same as one undivided instance, and how near to a tie that one was where they part."""

import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from tests.e2e.client import post

# Measured on one undivided instance alone: 4,204 answers to 32 prompts in random batches of 2 to 32, with and without
# other load on the machine: the log probability of a token changes by up to 1.7e-5, and no token did. What parts at a
# margin of more than this is no rounding.
MARGIN = 1e-4
# Ids instead of texts as the names of tokens: two pieces of characters have the same text.
BY_ID = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 5}


@dataclass(frozen=True)
class Said:
    """An instance's answer, with the log probabilities of alternatives."""

    token_ids: list[int]
    alternatives: list[dict[str, float]]
    text: str
    finish_reason: str

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "Said":
        choice = answer["choices"][0]
        alternatives = (choice.get("logprobs") or {}).get("top_logprobs") or []
        return cls(choice["token_ids"], alternatives, choice["text"], choice["finish_reason"])

    def margin(self, other: "Said") -> float | None:
        """Margin of this one's token, in log probability, at the first difference from the other. None without one."""
        for mine, theirs, alternatives in zip(self.token_ids, other.token_ids, self.alternatives, strict=False):
            if mine != theirs:
                return alternatives[f"token_id:{mine}"] - alternatives.get(f"token_id:{theirs}", float("-inf"))
        return None if len(self.token_ids) == len(other.token_ids) else float("inf")


def ask(url: str, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """An answer as it came, and the id of its handoff."""
    with post(url, path, body) as response:
        payload = response.read()
        assert response.status == HTTPStatus.OK, payload
        return json.loads(payload), response.headers["x-kvpipe-handoff"]


def differences(expected: list[Said], found: list[Said]) -> list[float]:
    """The margins at which answers part; those of rounding are printed."""
    margins = [mine.margin(theirs) for mine, theirs in zip(expected, found, strict=True)]
    parted = [margin for margin in margins if margin is not None]
    if parted:
        print(f"{len(parted)} of {len(expected)} answers part at margins of {sorted(parted)}")
    return [margin for margin in parted if margin > MARGIN]
