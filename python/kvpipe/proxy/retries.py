"""Decides whether a request that an instance failed may be sent to another one. No input or output, no clock."""

from collections.abc import Sequence
from typing import Literal

from kvpipe.proxy.instances import Instance
from kvpipe.proxy.metrics import Metrics
from kvpipe.proxy.upstream import InstanceError, Role

# Engines that one request may break before it is given up: it may be the request that ends them.
_MAX_BROKEN = 2
# Instances of a role that one request may reach before a token is shown.
_MAX_REACHED = 2
# Every request allows so many retries of the whole proxy.
_RETRIES_PER_REQUEST = 0.2
# Retries that a proxy without recent requests has.
_MAX_SAVED_RETRIES = 10.0

Denial = Literal["budget", "limit", "timeout"]


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


class Retries:
    """The instances that one request may still be sent to, and what its failures have used up.

    A connection that was refused reached no engine: it counts for nothing.

    Args:
        prefill: P's, in the order in which they are asked.
        decode: D's, likewise.
        budget: the proxy's budget.
        metrics: counts retries that are denied.
    """

    def __init__(
        self, prefill: Sequence[Instance], decode: Sequence[Instance], budget: RetryBudget, metrics: Metrics
    ) -> None:
        self._left: dict[Role, list[Instance]] = {"prefill": list(prefill), "decode": list(decode)}
        self._num_reached: dict[Role, int] = {"prefill": 0, "decode": 0}
        self._num_broken = 0
        self._has_shown_token = False
        self._budget = budget
        self._metrics = metrics

    def token_shown(self) -> None:
        """Note that the client has P's token: from now on every D that is left may be asked."""
        self._has_shown_token = True

    def has(self, role: Role) -> bool:
        """Whether an instance of a role is left that may be asked."""
        is_cut = not self._has_shown_token and self._num_reached[role] >= _MAX_REACHED
        return bool(self._left[role]) and not is_cut

    def first(self, role: Role) -> Instance:
        """The instance of a role to ask next, where there is one."""
        return self._left[role][0]

    def failed(self, error: InstanceError) -> None:
        """Note a failure; the instance is not asked again."""
        left = self._left[error.role]
        if error.instance in left:
            left.remove(error.instance)
        self._num_reached[error.role] += error.failure != "unreached"
        self._num_broken += error.has_broken_off

    def allows_decode_alone_after(self, error: InstanceError) -> bool:
        """Whether D may compute alone after a failure of P. That is no retry: it uses no budget."""
        return error.failure != "timeout" and self._num_broken < _MAX_BROKEN

    def allows_after(self, error: InstanceError) -> bool:
        """Whether another instance may be asked after this failure, which `failed` has noted; uses the budget."""
        denial: Denial | None = None
        if error.failure in ("timeout", "given_up"):
            denial = "timeout"
        elif self._num_broken >= _MAX_BROKEN:
            denial = "limit"
        elif error.failure != "unreached" and not self._budget.consume():
            denial = "budget"
        if denial is not None:
            self._metrics.retry_denied(denial)
        return denial is None
