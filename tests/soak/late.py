"""Tensors and entries with deadlines that are too short, while their peers answer: each fails alone.

What goes through the same pipe or buffer next is the healthy operation. It is counted with the one that was late.
"""

import itertools

import numpy as np

from kvpipe import CapacityError, ClosedError, PeerLostError, TransferTimeoutError
from tests.peers import MIB
from tests.soak.healthy import (
    CAPACITY_BYTES,
    DEADLINE_S,
    HEALTHY_TOKEN,
    check_consumed,
    check_entry,
    healthy,
    move_tensor,
    select_entry,
)

# A transfer takes about as long: some deadlines pass before a tensor has met its receive, some while it is moved.
LATEST_S = 0.05
TENSOR_BYTES = 32 * MIB
ENTRY_BYTES = 4 * MIB
# Fits into an empty buffer only.
FULL_BYTES = CAPACITY_BYTES - MIB
LATE_TOKEN = HEALTHY_TOKEN + 1


class LateTensors:
    """A pipe of which one end has too little time."""

    def __init__(self, rng, shared):
        self._rng, self._shared = rng, shared
        self._sender, self._receiver = shared.pair.late_sender, shared.pair.late_receiver
        self._tensor, self._out = (np.zeros(TENSOR_BYTES, np.uint8) for _ in range(2))
        self.is_closed = False

    def act(self):
        """One tensor is late, or almost; the next one arrives."""
        begin = self._rng.choice((self._send_alone, self._receive_alone, self._send, self._receive))
        try:
            begin(self._rng.uniform(0, LATEST_S))
        except (ClosedError, PeerLostError):
            self.is_closed = True
            raise

    def _send_alone(self, late_s):
        assert failed_late(self._sender.isend_tensor(self._tensor, timeout=late_s)), "sent, and not received"
        self._count(lost=False)
        self._move_next()

    def _receive_alone(self, late_s):
        assert failed_late(self._receiver.irecv_tensor(timeout=late_s)), "received, and not sent"
        self._count(lost=False)
        self._move_next()

    def _send(self, late_s):
        """Its receive, which has time, gets the tensor, or fails with it, or gets the next one."""
        value = self._fill()
        received = self._receiver.irecv_tensor(timeout=DEADLINE_S)
        late = failed_late(self._sender.isend_tensor(self._tensor, timeout=late_s))
        self._tensor.fill(0)  # it is not read any more
        if not late:
            assert is_filled(received.wait(DEADLINE_S), value), "wrong bytes"
            return
        following = self._following()
        sent = self._sender.isend_tensor(following, timeout=DEADLINE_S)
        is_lost = bool(failed_late(received))
        found = self._receiver.recv_tensor(timeout=DEADLINE_S) if is_lost else received.result()
        if "not known" in late and is_filled(found, value):
            found = self._receiver.recv_tensor(timeout=DEADLINE_S)
        assert np.array_equal(found, following), "wrong bytes"
        sent.wait(DEADLINE_S)
        self._count(lost=is_lost)

    def _receive(self, late_s):
        """Its send, which has time, ends well with this receive or the next one, or fails with it."""
        value = self._fill()
        out = self._rng.choice((None, self._out))
        sent = self._sender.isend_tensor(self._tensor, timeout=DEADLINE_S)
        received = self._receiver.irecv_tensor(out=out, timeout=late_s)
        late = failed_late(received)
        is_lost = "it is lost" in late
        if is_lost:
            assert failed_late(sent), "sent, but its receiver has lost it"
        else:
            found = self._receiver.recv_tensor(timeout=DEADLINE_S) if late else received.result()
            assert is_filled(found, value), "wrong bytes"
            sent.wait(DEADLINE_S)
        self._out.fill(0)  # it is not written into any more
        if late:
            self._count(lost=is_lost)
        self._move_next()
        assert not self._out.any(), "a late receive wrote after it was settled"

    def _fill(self):
        value = self._rng.randrange(1, 256)
        self._tensor.fill(value)
        return value

    def _following(self):
        return np.full(self._rng.randrange(1, MIB), self._rng.randrange(256), np.uint8)

    def _move_next(self):
        move_tensor(self._sender, self._receiver, self._following())

    def _count(self, *, lost):
        self._shared.goes_on("late_tensors", late_tensors=1, lost_tensors=lost)


def is_filled(tensor, value):
    """True for a late tensor with this value."""
    return tensor.size == TENSOR_BYTES and bool((tensor == value).all())


def failed_late(work):
    """Reason for which an operation failed at its deadline, or "" if it did not. It is settled then."""
    try:
        work.wait(DEADLINE_S)
    except TransferTimeoutError as error:
        assert work.is_completed(), f"no end within {DEADLINE_S} s"
        work.settled(DEADLINE_S)
        return str(error)
    return ""


def late_tensors(rng, shared):
    """Large tensors that have 0 to 50 ms at one end: each arrives, is withdrawn, or is lost at both ends."""
    late = LateTensors(rng, shared)
    while healthy(shared, "late_tensors", late.act) and not late.is_closed:
        pass  # a pipe that is closed was hit once


class LateEntries:
    """Inserts and selects that have too little time, at a buffer's server or its client."""

    def __init__(self, rng, shared):
        self._rng, self._shared = rng, shared
        self._buffers = shared.pair.server, shared.pair.client
        self._numbers = itertools.count()
        self._full = np.zeros(FULL_BYTES, np.uint8)

    def act(self):
        """One operation is late, or almost; the next ones are not."""
        begin = self._rng.choice((self._insert_without_space, self._select_nothing, self._insert, self._select))
        begin(self._rng.uniform(0, LATEST_S))

    def _insert_without_space(self, late_s):
        """The healthy inserts of others wait behind it, and go on."""
        present, absent = (self._entry(), self._entry())
        self._insert_within(DEADLINE_S, *present)
        late = self._insert_within(late_s, absent[0], self._full)
        assert isinstance(late, CapacityError), f"an insert without space ended with {late!r}"
        self._count()
        self._check_absent(absent[0])
        check_entry(select_entry(self._buffers, self._rng, present[0]), *present)
        check_consumed(self._buffers, self._rng, present[0])

    def _select_nothing(self, late_s):
        tokens, key = self._entry()
        found = select_entry(self._buffers, self._rng, tokens, late_s)
        assert found[0] is None, f"entry {found[0]}, which was not inserted"
        self._count()
        self._insert_within(DEADLINE_S, tokens, key)
        check_entry(select_entry(self._buffers, self._rng, tokens), tokens, key)
        check_consumed(self._buffers, self._rng, tokens)

    def _insert(self, late_s):
        """Its transfer may take longer than it may wait for space."""
        tokens, key = self._entry()
        late = self._insert_within(late_s, tokens, key)
        if late is None:
            check_entry(select_entry(self._buffers, self._rng, tokens), tokens, key)
            check_consumed(self._buffers, self._rng, tokens)
            return
        self._count()
        if "nothing was inserted" in str(late):
            self._check_absent(tokens)
        else:
            assert "not known" in str(late), f"an insert ended with {late!r}"
            select_entry(self._buffers, self._rng, tokens, LATEST_S)

    def _select(self, late_s):
        """The entry goes to this select, or to the next one, and to no other."""
        tokens, key = self._entry()
        inserted = self._rng.choice(self._buffers).iinsert(tokens, None, key, None, None)
        found = select_entry(self._buffers, self._rng, tokens, late_s)
        inserted.wait(DEADLINE_S)
        if found[0] is None:
            self._count()
            found = select_entry(self._buffers, self._rng, tokens)
        check_entry(found, tokens, key)
        check_consumed(self._buffers, self._rng, tokens)

    def _entry(self):
        tokens = np.array([LATE_TOKEN, next(self._numbers)])
        return tokens, np.full(self._rng.randrange(MIB, ENTRY_BYTES), self._rng.randrange(256), np.uint8)

    def _insert_within(self, timeout, tokens, key):
        """The error if it was late."""
        try:
            self._rng.choice(self._buffers).insert(tokens, None, key, None, None, timeout=timeout)
        except (CapacityError, TransferTimeoutError) as late:
            if timeout == DEADLINE_S:
                raise
            return late
        return None

    def _check_absent(self, tokens):
        assert select_entry(self._buffers, self._rng, tokens, 0)[0] is None, "an insert that has failed was inserted"

    def _count(self):
        self._shared.goes_on("late_entries", late_entries=1)


def late_entries(rng, shared):
    """Inserts and selects that have 0 to 50 ms, where healthy entries go in and out."""
    late = LateEntries(rng, shared)
    while healthy(shared, "late_entries", late.act):
        pass


LATE = (late_tensors, late_entries)
