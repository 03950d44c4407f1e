"""One client's request as a state machine: after each failure it decides which instance is asked next. Pure.

No input or output, no clock: `kvpipe.proxy.attempts` takes the steps, and reports what became of them.
"""

from collections.abc import Callable, Iterator, Sequence
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

# True if an instance may be sent a request now.
Available = Callable[[Role, Instance], bool]
# Route of a request: P and D by a handoff or through a store that they share, or one of them alone.
Route = Literal["handoff", "store", "prefill", "decode"]
# `split`: P, and D on a new handoff. `same`: another D on the handoff that P has begun. `alone`: the instance that the
# step has. `resume`: another D, from P's token on. `final`: none, the failure is the answer.
Kind = Literal["split", "same", "alone", "resume", "final"]
Denial = Literal["budget", "limit", "timeout"]


@dataclass(frozen=True, slots=True)
class Step:
    """The next step of a request.

    Attributes:
        kind: the kind of step.
        prefill: the P that is asked; None if none is.
        decode: the D that is asked; None if none is.
        denial: reason against asking another instance of the role that failed; None if one may be, or none is left.
        is_fallback: true if D computes the prompt because no P may be asked.
    """

    kind: Kind
    prefill: Instance | None = None
    decode: Instance | None = None
    denial: Denial | None = None
    is_fallback: bool = False


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


class RoutedRequest:
    """The instances that one request may still be sent to, its failures, and what its client has got.

    A connection that was refused reached no engine: it counts for nothing.

    Args:
        route: route of the request, as long as no P fails.
        prefill: P's, in the order in which they are asked.
        decode: D's, likewise.
        budget: the proxy's budget of retries.
        falls_back: true if D computes the prompt when no P may be asked any more.
        is_available: tells which of them may be sent a request now.
    """

    def __init__(
        self,
        route: Route,
        prefill: Sequence[Instance],
        decode: Sequence[Instance],
        budget: RetryBudget,
        *,
        falls_back: bool = True,
        is_available: Available = lambda _role, _instance: True,
    ) -> None:
        self._route = route
        self._left: dict[Role, list[Instance]] = {"prefill": list(prefill), "decode": list(decode)}
        self._failures: list[InstanceError] = []
        self._client_has: Literal["nothing", "token", "text"] = "nothing"
        self._has_resumed = False
        self._budget = budget
        self._falls_back = falls_back
        self._is_available = is_available

    def first(self) -> Step:
        """The first step; `final` if no instance is available."""
        if self._route != "decode" and not self._has("prefill") and self._falls_back:
            return self._fall_back()
        return self._begin()

    def may_leave(self, role: Role, instance: Instance) -> bool:
        """Returns true if another one can answer for an instance that is frozen."""
        if self._client_has == "text":
            return False
        if role == "decode" or self._route == "prefill":
            return self._has(role, without=instance) or (role == "prefill" and self._falls_back)
        return self._has("decode") and (self._falls_back or self._has("prefill", without=instance))

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
            return self._fall_back(denial)
        return Step("final", denial=denial)

    def _begin(self) -> Step:
        prefill, decode = self._next("prefill"), self._next("decode")
        if self._route == "prefill" and prefill is not None:
            return Step("alone", prefill=prefill)
        if self._route == "decode" and decode is not None:
            return Step("alone", decode=decode)
        is_split = self._route in ("handoff", "store") and prefill is not None and decode is not None
        return Step("split", prefill, decode) if is_split else Step("final")

    def _fall_back(self, denial: Denial | None = None) -> Step:
        self._route = "decode"
        decode = self._next("decode")
        kind: Kind = "final" if decode is None else "alone"
        return Step(kind, decode=decode, denial=denial, is_fallback=decode is not None)

    def _replace(self, error: InstanceError) -> Step:
        is_split = self._route in ("handoff", "store")
        keeps_prefill = self._route == "store" or error.failure == "unreached"
        if is_split and error.role == "decode" and keeps_prefill:
            return Step("same", decode=self._next("decode"))
        return self._begin()

    def _resume_after(self, error: InstanceError) -> Step:
        """Another D; if there is none, the one that failed gets a second chance, if it was reached."""
        has_resumed, self._has_resumed = self._has_resumed, True
        is_again = not has_resumed and error.failure not in ("unreached", "frozen")
        left = [*self._usable("decode")] or ([error.instance] if is_again else [])
        denial = self._denial(error) if left else None
        return Step("resume", decode=left[0]) if left and denial is None else Step("final", denial=denial)

    def _may_fall_back(self, error: InstanceError) -> bool:
        """True if D may compute alone after a failure of P. That is no retry: it uses no budget."""
        is_worth_it = error.failure != "timeout" and self._num_broken < _MAX_BROKEN
        return self._falls_back and is_worth_it and self._has("decode")

    def _has(self, role: Role, without: Instance | None = None) -> bool:
        """True if an instance of a role is left that may be asked, without the server of one that is frozen."""
        num_reached = sum(failure.role == role and failure.failure != "unreached" for failure in self._failures)
        num_reached += without is not None
        has_other = any(without is None or instance.url != without.url for instance in self._usable(role))
        return has_other and (num_reached < _MAX_REACHED or self._client_has != "nothing")

    def _usable(self, role: Role) -> Iterator[Instance]:
        return (instance for instance in self._left[role] if self._is_available(role, instance))

    def _next(self, role: Role) -> Instance | None:
        return next(self._usable(role)) if self._has(role) else None

    @property
    def _names_rank(self) -> bool:
        """False if vLLM chooses the rank, because the instance answers alone."""
        return self._route in ("handoff", "store")

    @property
    def _num_broken(self) -> int:
        # vLLM ends all data-parallel ranks of a server with one of them.
        return len({failure.instance.url for failure in self._failures if failure.has_broken_off})

    def _note(self, failure: InstanceError | None) -> None:
        """Note a failure, once; the instance, or its server, is not asked again."""
        if failure is None or failure in self._failures:
            return
        self._failures.append(failure)
        is_server, failed = failure.is_of_server(names_rank=self._names_rank), failure.instance
        left = self._left[failure.role]
        left[:] = [each for each in left if (each.url != failed.url if is_server else each != failed)]

    def _denial(self, error: InstanceError) -> Denial | None:
        """Reason against asking another instance after this failure. If one may be asked, uses the budget."""
        if error.failure in ("timeout", "given_up"):
            return "timeout"
        if self._num_broken >= _MAX_BROKEN:
            return "limit"
        # One that is frozen has computed nothing that is known, and gets no other request.
        is_free = error.failure in ("unreached", "frozen")
        return None if is_free or self._budget.consume() else "budget"
