"""Which instances the latest handoffs ran on, so that `/status/<id>` knows whom to ask."""

from collections import OrderedDict

# About 2 MB; older handoffs are looked for at every instance.
_MAX_REMEMBERED = 10_000


class RecentHandoffs:
    """Control addresses by handoff id, for the latest handoffs."""

    def __init__(self, everyone: tuple[str, ...], capacity: int = _MAX_REMEMBERED) -> None:
        self._everyone = everyone
        self._capacity = capacity
        self._addresses: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def remember(self, handoff: str, *addresses: str) -> None:
        """Note whom to ask about a handoff, in this order; empty addresses are left out."""
        self._addresses[handoff] = tuple(address for address in addresses if address)
        if len(self._addresses) > self._capacity:
            self._addresses.popitem(last=False)

    def addresses(self, handoff: str) -> tuple[str, ...]:
        """Whom to ask: the instances of that handoff, or everyone when it is not remembered."""
        return self._addresses.get(handoff, self._everyone)
