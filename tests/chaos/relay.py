"""A wire that can be cut, stalled and made to lie: TCP relays on one thread, at the same ports of another address."""

import contextlib
import selectors
import socket
import threading
from dataclasses import dataclass, field

# Servers listen at the first, and are reached at the second.
HERE, RELAYED = "127.0.0.1", "127.0.0.2"
CHUNK_BYTES = 1 << 16


@dataclass(eq=False)
class Direction:
    """Bytes of one direction of a connection."""

    port: int
    source: socket.socket
    target: socket.socket
    pending: bytes = b""


@dataclass
class Wire:
    """State of the wire to one port.

    Attributes:
        is_stalled: True while it passes nothing on.
        num_to_flip: Chunks in which a bit is still to be flipped.
        num_flipped: Chunks in which one was.
    """

    is_stalled: bool = False
    num_to_flip: int = 0
    num_flipped: int = 0
    directions: list[Direction] = field(default_factory=list)


class Relay:
    """Relays of some ports. A context manager.

    Args:
        ports: Ports of servers, which may start later and be replaced.
        rng: Picks the bits to flip.
    """

    def __init__(self, ports, rng):
        self._rng = rng
        self._lock = threading.Lock()
        self._wires = {port: Wire() for port in ports}
        self._selector = selectors.DefaultSelector()
        self._waker, wakes = socket.socketpair()
        self._wakes = wakes
        wakes.settimeout(0)
        self._selector.register(wakes, selectors.EVENT_READ)
        self._listeners = []
        for port in ports:
            listener = socket.create_server((RELAYED, port))
            listener.settimeout(0)
            self._listeners.append(listener)
            self._selector.register(listener, selectors.EVENT_READ, port)
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="relay")

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._is_over = True
        self._waker.send(b".")
        self._thread.join()
        self.cut(list(self._wires))
        for each in (*self._listeners, self._waker, self._wakes, self._selector):
            each.close()

    def cut(self, ports):
        """Ends all connections to these ports. Later ones are relayed."""
        with self._lock:
            for port in ports:
                for direction in list(self._wires[port].directions):
                    self._close(direction)

    def stall(self, ports, *, is_stalled):
        """Passes nothing on, in neither direction, until it is called again."""
        with self._lock:
            for port in ports:
                wire = self._wires[port]
                wire.is_stalled = is_stalled
                for direction in wire.directions:
                    self._watch(direction)
        self._waker.send(b".")

    def flip(self, ports, num_chunks):
        """Flips a bit of each of the next chunks."""
        with self._lock:
            for port in ports:
                self._wires[port].num_to_flip = num_chunks

    @property
    def num_flipped(self):
        """Chunks that were changed so far."""
        return sum(wire.num_flipped for wire in self._wires.values())

    # --- its thread

    def _run(self):
        while not self._is_over:
            for key, _ in self._selector.select():
                with self._lock:
                    self._handle(key)

    def _handle(self, key):
        if key.fileobj is self._wakes:
            with contextlib.suppress(BlockingIOError):
                self._wakes.recv(CHUNK_BYTES)
        elif isinstance(key.data, int):
            self._accept(key.fileobj, key.data)
        else:
            for direction in self._of(key.fileobj):
                if direction.source.fileno() >= 0:  # not closed meanwhile
                    self._pass_on(direction, key.fileobj)

    def _of(self, sock):
        return [each for wire in self._wires.values() for each in list(wire.directions) if sock in _ends(each)]

    def _accept(self, listener, port):
        near, _ = listener.accept()
        try:
            far = socket.create_connection((HERE, port), timeout=1)
        except OSError:
            near.close()
            return
        for sock in (near, far):
            sock.settimeout(0)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        wire = self._wires[port]
        wire.directions += [Direction(port, near, far), Direction(port, far, near)]
        for direction in wire.directions[-2:]:
            self._watch(direction)

    def _pass_on(self, direction, sock):
        wire = self._wires[direction.port]
        try:
            if sock is direction.source and not direction.pending:
                chunk = sock.recv(CHUNK_BYTES)
                if not chunk:
                    self._close(direction)
                    return
                direction.pending = self._flipped(wire, chunk)
            if direction.pending:
                direction.pending = direction.pending[direction.target.send(direction.pending) :]
        except BlockingIOError:
            pass
        except OSError:
            self._close(direction)
            return
        self._watch(direction)

    def _flipped(self, wire, chunk):
        if not wire.num_to_flip:
            return chunk
        wire.num_to_flip -= 1
        wire.num_flipped += 1
        changed = bytearray(chunk)
        changed[self._rng.randrange(len(changed))] ^= 1 << self._rng.randrange(8)
        return bytes(changed)

    def _watch(self, direction):
        """Watches both sockets for what their two directions can do next."""
        for sock in _ends(direction):
            events = 0
            for each in self._wires[direction.port].directions:
                if self._wires[direction.port].is_stalled:
                    continue
                if each.source is sock and not each.pending:
                    events |= selectors.EVENT_READ
                if each.target is sock and each.pending:
                    events |= selectors.EVENT_WRITE
            is_known = sock in self._selector.get_map()
            if events and is_known:
                self._selector.modify(sock, events)
            elif events:
                self._selector.register(sock, events)
            elif is_known:
                self._selector.unregister(sock)

    def _close(self, direction):
        wire = self._wires[direction.port]
        wire.directions = [each for each in wire.directions if each.source not in _ends(direction)]
        for sock in _ends(direction):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(sock)
            sock.close()


def _ends(direction):
    return direction.source, direction.target
