"""One client's request as a state machine: after each failure it decides which instance is asked next. Pure.

No input or output, no clock: `kvpipe.proxy.attempts` takes the steps, and reports what became of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvpipe.proxy.instances import Instance
from kvpipe.proxy.upstream import InstanceError, Role

# Engines that one request may break before it is given up: it may be the request that ends them.
_MAX_BROKEN = 2
# Instances of a role that one request may reach before a token is shown.
_MAX_REACHED = 2
# Every request allows so many retries of the whole proxy.
_RETRIES_PER_REQUEST = 0.2
# Retries that a proxy without recent requests has.
_MAX_SAVED_RETRIES = 10.0

# How a request is answered: P and D by a handoff or through a store that they share, or one of them alone.
Route = Literal["handoff", "store", "prefill", "decode"]
# `split`: P, and D on a new handoff. `same`: another D on the handoff that P has begun. `alone`: the instance that the
# step has. `resume`: another D, from P's token on. `final`: nobody, the failure is the answer.
Kind = Literal["split", "same", "alone", "resume", "final"]
Denial = Literal["budget", "limit", "timeout"]


@dataclass(frozen=True, slots=True)
class Step:
    """The next step of a request.

    Attributes:
        kind: the kind of step.
        prefill: the P that is asked; None if none is.
        decode: the D that is asked; None if none is.
        denial: why no other instance of the role that failed may be asked; None if one may, or none is left.
    """

    kind: Kind
    prefill: Instance | None = None
    decode: Instance | None = None
    denial: Denial | None = None


class RetryBudget:
    """A token bucket that bounds the retries of the whole proxy to a share of its requests."""

    def __init__(self) -> None:
        self._num_left = _MAX_SAVED_RETRIES

    def add_request(self) -> None:
        """Count a request, which adds its share."""
        self._num_left = min(_MAX_SAVED_RETRIES, self._num_left + _RETRIES_PER_REQUEST)

    def consume(self) -> bool:
        """Use one retry; False when none is left."""
        if self._num_left < 1.0:
            return False
        self._num_left -= 1.0
        return True


class Request:
    """The instances that one request may still be sent to, its failures, and what its client has got.

    A connection that was refused reached no engine: it counts for nothing.

    Args:
        route: how it is answered, as long as no P fails.
        prefill: P's, in the order in which they are asked.
        decode: D's, likewise.
        budget: the proxy's budget of retries.
        falls_back: whether D computes the prompt where no P may be asked any more.
    """

    def __init__(
        self,
        route: Route,
        prefill: Sequence[Instance],
        decode: Sequence[Instance],
        budget: RetryBudget,
        *,
        falls_back: bool = True,
    ) -> None:
        self._route = route
        self._left: dict[Role, list[Instance]] = {"prefill": list(prefill), "decode": list(decode)}
        self._failures: list[InstanceError] = []
        self._client_has: Literal["nothing", "token", "text"] = "nothing"
        self._has_resumed = False
        self._budget = budget
        self._falls_back = falls_back

    def first(self) -> Step:
        """The first step."""
        return self._begin()

    def token_shown(self) -> None:
        """Note that the client has P's token: from now on every D that is left may be asked."""
        self._client_has = "token"

    def text_shown(self) -> None:
        """Note that the client has text of D's own: no other D can continue it."""
        self._client_has = "text"

    def failed(self, error: InstanceError, beside: InstanceError | None = None) -> Step:
        """The step after a failure; `beside` is that of a P whose D went on and failed, too."""
        for failure in (beside, error):
            self._note(failure)
        if self._client_has == "text":
            return Step("final")
        if self._client_has == "token":
            return self._resume_after(error)
        denial = self._denial(error) if self._has(error.role) else None
        if denial is None and self._has(error.role):
            return self._replace(error)
        if error.role == "prefill" and self._may_fall_back(error):
            self._route = "decode"
            return Step("alone", decode=self._left["decode"][0], denial=denial)
        return Step("final", denial=denial)

    def _begin(self) -> Step:
        prefill, decode = (self._left[role][0] if self._has(role) else None for role in ("prefill", "decode"))
        if self._route == "prefill":
            return Step("alone", prefill=prefill)
        if self._route == "decode":
            return Step("alone", decode=decode)
        return Step("final") if prefill is None or decode is None else Step("split", prefill, decode)

    def _replace(self, error: InstanceError) -> Step:
        is_split = self._route in ("handoff", "store")
        keeps_prefill = self._route == "store" or error.failure == "unreached"
        if is_split and error.role == "decode" and keeps_prefill:
            return Step("same", decode=self._left["decode"][0])
        return self._begin()

    def _resume_after(self, error: InstanceError) -> Step:
        """Another D; where there is none, the one that failed gets a second chance, if it was reached."""
        has_resumed, self._has_resumed = self._has_resumed, True
        left = self._left["decode"] or ([] if has_resumed or error.failure == "unreached" else [error.instance])
        denial = self._denial(error) if left else None
        return Step("resume", decode=left[0]) if left and denial is None else Step("final", denial=denial)

    def _may_fall_back(self, error: InstanceError) -> bool:
        """Whether D may compute alone after a failure of P. That is no retry: it uses no budget."""
        is_worth_it = error.failure != "timeout" and self._num_broken < _MAX_BROKEN
        return self._falls_back and is_worth_it and self._has("decode")

    def _has(self, role: Role) -> bool:
        """Whether an instance of a role is left that may be asked."""
        num_reached = sum(failure.role == role and failure.failure != "unreached" for failure in self._failures)
        return bool(self._left[role]) and (num_reached < _MAX_REACHED or self._client_has != "nothing")

    @property
    def _num_broken(self) -> int:
        return sum(failure.has_broken_off for failure in self._failures)

    def _note(self, failure: InstanceError | None) -> None:
        """Note a failure, once; the instance is not asked again."""
        if failure is None or failure in self._failures:
            return
        self._failures.append(failure)
        left = self._left[failure.role]
        if failure.instance in left:
            left.remove(failure.instance)

    def _denial(self, error: InstanceError) -> Denial | None:
        """Why no other instance may be asked after this failure; uses the budget where one may."""
        if error.failure in ("timeout", "given_up"):
            return "timeout"
        if self._num_broken >= _MAX_BROKEN:
            return "limit"
        return None if error.failure == "unreached" or self._budget.consume() else "budget"
