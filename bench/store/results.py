"""Outcomes of the calls of a run: `Survival`, and the `Ledger` that counts it from the reports of clients."""

from __future__ import annotations

from dataclasses import dataclass
from threading import Condition
from typing import TYPE_CHECKING, ClassVar

from bench.chaos import Counts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

# For the machine: a call may be late by so much.
MARGIN_S = 2.0
# Errors that a store has no reason for, whatever its servers do.
_BUGS = ("ConfigError", "ProtocolError", "IncompatiblePeerError")


@dataclass
class Survival(Counts):
    """Outcomes of calls while servers and clients were killed, frozen and changed.

    Attributes:
        calls: Calls that have ended.
        errors: Those of them that ended with an error of kvpipe.
        values_read: Values that were compared with their names.
        acknowledged: Values that were taken and acknowledged.
        servers_killed: How often one was killed, and started again.
        servers_frozen: How often one was stopped for a while.
        roles_changed: How often a replica became the primary.
        passwords_changed: How often the servers wanted another password for a while.
        connections_killed: How often the server ended all connections.
        slots_moved: How often a slot of the cluster went to another server.
        memory_short: How often the server had to evict.
        entries_evicted: Entries that it has evicted then.
        clients_killed_in_put: Clients that were killed with a value half put.
        clients_killed_in_lease: Clients that were killed with a lease.
        longest_call_ms: Of all calls, what they waited by themselves included.
        longest_recovery_ms: From the end of a fault until each client had a call without an error.
        orphans: Parts of evicted values that are left at the end, and evicted next.
        wrong: Values with other bytes than were put.
        twice: Values that were acknowledged twice, or found after they had been acknowledged.
        late: Calls that took longer than their limit and `MARGIN_S`.
        corrupt: Values that a store without evictions found damaged.
        failed: Errors that no fault explains, and clients that ended by themselves.
        unrecovered: Faults after which a client had no call without an error in time.
        unanswered: Stores that did not answer at the end.
        leases_left: Leases, reservations and waits that did not end by time.
        leaked: Entries at the end that no listed value has.
    """

    VIOLATIONS: ClassVar[Sequence[str]] = (
        *("wrong", "twice", "late", "corrupt", "failed"),
        *("unrecovered", "unanswered", "leases_left", "leaked"),
    )

    calls: int = 0
    errors: int = 0
    values_read: int = 0
    acknowledged: int = 0
    servers_killed: int = 0
    servers_frozen: int = 0
    roles_changed: int = 0
    passwords_changed: int = 0
    connections_killed: int = 0
    slots_moved: int = 0
    memory_short: int = 0
    entries_evicted: int = 0
    clients_killed_in_put: int = 0
    clients_killed_in_lease: int = 0
    longest_call_ms: int = 0
    longest_recovery_ms: int = 0
    orphans: int = 0
    wrong: int = 0
    twice: int = 0
    late: int = 0
    corrupt: int = 0
    failed: int = 0
    unrecovered: int = 0
    unanswered: int = 0
    leases_left: int = 0
    leaked: int = 0


class Ledger:
    """The reports of all clients of a store.

    Args:
        may_lose: True if the store evicts: a value may be damaged then.

    Attributes:
        found: Outcomes of the calls.
        changed: Notified after each report; guards everything.
    """

    def __init__(self, *, may_lose: bool) -> None:
        self._may_lose = may_lose
        self.found = Survival()
        self.changed = Condition()
        self._served_ns: dict[str, int] = {}
        self._acknowledged_ns: dict[str, list[int]] = {}
        self._seen_ns: dict[str, int] = {}

    def note(self, client: str, words: Mapping[str, str]) -> None:
        """Counts one report."""
        with self.changed:
            if "call" in words:
                self._note_call(client, words)
            elif "wrong" in words:
                self.found.fail("wrong", f"{words['key']} of {words['wrong']} has other bytes")
            elif "seen" in words:
                record = words["seen"]
                self._seen_ns[record] = max(int(words["at"]), self._seen_ns.get(record, 0))
            elif "acknowledged" in words:
                self._acknowledged_ns.setdefault(words["acknowledged"], []).append(int(words["at"]))
                self.found.acknowledged += 1
            elif "bug" in words:
                self.found.fail("failed", f"{client} raised {words['bug']} in {words['where']}")
            self.changed.notify_all()

    def _note_call(self, client: str, words: Mapping[str, str]) -> None:
        found, error = self.found, words["error"]
        found.calls += 1
        found.longest_call_ms = max(found.longest_call_ms, round(int(words["took"]) / 1e6))
        if int(words["late"]) > MARGIN_S * 1e9:
            self.found.fail(
                "late", f"{words['call']} of {client} took {int(words['took']) / 1e9:.1f} s: {error or 'no error'}"
            )
        if not error:
            self._served_ns[client] = max(int(words["began"]), self._served_ns.get(client, 0))
            found.values_read += words["call"] == "read"
            return
        found.errors += 1
        if error in _BUGS:
            self.found.fail("failed", f"{words['call']} of {client} raised {error}")
        if error == "CorruptDataError" and not self._may_lose:
            self.found.fail("corrupt", f"{words['call']} of {client} raised {error}")

    @property
    def num_served(self) -> int:
        """Calls without an error."""
        return self.found.calls - self.found.errors

    def served_since(self, client: str, at_ns: int) -> bool:
        """True if a call of the client that began after this time had no error."""
        return self._served_ns.get(client, 0) > at_ns

    def end(self) -> None:
        """Looks at acknowledged values."""
        with self.changed:
            for record, at_ns in self._acknowledged_ns.items():
                if len(at_ns) > 1:
                    self.found.fail("twice", f"the value {record} was acknowledged {len(at_ns)} times", len(at_ns) - 1)
                if self._seen_ns.get(record, 0) > min(at_ns):
                    self.found.fail("twice", f"the value {record} was found after it had been acknowledged")
