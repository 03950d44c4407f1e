"""Which instances the latest handoffs ran on, so that `/status/<id>` knows whom to ask, and how they were timed."""

from collections import OrderedDict

from kvpipe.proxy.just_in_time import Timing

# About 4 MB; older handoffs are looked for at every instance.
_MAX_REMEMBERED = 10_000


class RecentHandoffs:
    """Control addresses and timing by handoff id, for the latest handoffs."""

    def __init__(self, everyone: tuple[str, ...], capacity: int = _MAX_REMEMBERED) -> None:
        self._everyone = everyone
        self._capacity = capacity
        self._known: OrderedDict[str, tuple[tuple[str, ...], Timing | None]] = OrderedDict()

    def remember(self, handoff: str, *addresses: str, timing: Timing | None = None) -> None:
        """Note whom to ask about a handoff, in this order; empty addresses are left out."""
        self._known[handoff] = (tuple(address for address in addresses if address), timing)
        if len(self._known) > self._capacity:
            self._known.popitem(last=False)

    def addresses(self, handoff: str) -> tuple[str, ...]:
        """Whom to ask: the instances of that handoff, or everyone when it is not remembered."""
        return self._known.get(handoff, (self._everyone, None))[0]

    def timing(self, handoff: str) -> Timing | None:
        """How it was timed; None when that is not remembered, or was not a matter of prediction."""
        return self._known.get(handoff, ((), None))[1]
