"""LookupBuffer: KV entries that are found by their tokens, each delivered once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from kvpipe import _kvpipe
from kvpipe._closing import Closing
from kvpipe._tensor import Described, describe, rebuild
from kvpipe._transport import transport
from kvpipe.config import resolve_token
from kvpipe.exceptions import ConfigError, TransportUnavailableError
from kvpipe.work import Work

_NUM_TENSORS = 5


@dataclass(frozen=True)
class LookupBufferStats:
    """Counters of a lookup buffer. What only the server knows is `None` at a client.

    Attributes:
        num_inserted: Entries that were inserted; of a buffer that serves, by its clients too.
        num_taken: Entries that were taken; of a buffer that serves, by its clients too.
        num_waiting: Inserts that wait for place and selects that wait for an entry.
        num_entries: Entries that can be selected.
        num_leased: Entries on their way to a consumer, or with one that has not looked at them.
        num_bytes: Bytes that all entries, leased ones included, and inserts under way count: see `LookupBuffer`.
        capacity_bytes: How many bytes there may be.
        transport: What carries large tensors between client and servers: `cma`, `tcp`, `rc_mlx5`, …; empty in the
            same process.
    """

    num_inserted: int
    num_taken: int
    num_waiting: int
    num_entries: int | None
    num_leased: int | None
    num_bytes: int | None
    capacity_bytes: int | None
    transport: str


class LookupBuffer(Closing):
    """Entries of KV cache between producers, who `insert`, and consumers, who `drop_select` by tokens.

    An entry has five tensors: input tokens, region of interest, key, value, hidden states. `LookupBuffer(...)` keeps
    entries in this process, and with `serve` for other processes too; `LookupBuffer.connect(...)` uses those of others.
    Each entry is delivered to exactly one consumer and dropped. One whose consumer dies before it has all bytes goes
    back to its old place.

    The tokens of an entry or a query are those of `input_tokens` where `roi` is true. They match when the shorter are
    a prefix of the longer. The longest match wins, of several the oldest entry.

    Any thread may call. Ctrl-C interrupts every wait. In a process that was forked from the one that made the buffer,
    every call raises `ClosedError`.

    Args:
        capacity_bytes: How many bytes all entries may take together. Each counts its tensors with their dtypes and
            shapes, 8 bytes for each token that counts, and 2 KiB of bookkeeping.
    """

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        if not isinstance(capacity_bytes, int) or capacity_bytes < 1:
            message = f"capacity_bytes={capacity_bytes!r}: expected a number of bytes, 1 or more"
            raise ConfigError(message)
        self._native = _kvpipe.LookupBuffer(capacity_bytes)

    @classmethod
    def connect(
        cls, *addresses: str, token: str | None = None, timeout: float = 10, checksum: bool = True
    ) -> LookupBuffer:
        """Uses buffers that other processes serve.

        With several addresses, inserts go to the first and selects to all: the first server that has an entry delivers
        it, the longest match is that of its server. When one of the servers is lost, so is the buffer: calls raise
        `PeerLostError`, and entries that had not arrived stay with their servers.

        Args:
            addresses: The servers' `address`, one or more.
            token: The shared secret; by default `KVPIPE_TOKEN`.
            timeout: Seconds until all servers must have accepted.
            checksum: Whether the server compares large tensors that are inserted with checksums (as of `Pipe.connect`).
                Small ones always are.

        Raises:
            ConnectError: Nobody answers there.
            AuthenticationError: A server has another token.
            TransportUnavailableError: There is no usable UCX.
        """
        native, connected = _kvpipe.LookupBuffer.connect(
            addresses, resolve_token(token), transport(), checksum, timeout
        )
        try:
            Work(connected, lambda _: None).wait()
        except BaseException:
            native.close()
            raise
        buffer = cls.__new__(cls)
        buffer._native = native  # noqa: SLF001 - of this class
        return buffer

    def serve(self, address: str = "127.0.0.1:0", token: str | None = None, *, checksum: bool = True) -> None:
        """Lets other processes use this buffer too; returns at once.

        Args:
            address: `host:port`; port 0 picks a free one, see the property `address`.
            token: The shared secret; by default `KVPIPE_TOKEN`. Needed for addresses other than loopback.
            checksum: Whether consumers compare large tensors that they take with checksums. Small ones always are.

        Raises:
            ConfigError: The address cannot be bound, or the buffer is served already or belongs to others.
            TransportUnavailableError: There is no usable UCX.
        """
        self._native.serve(address, resolve_token(token), transport(), checksum)

    @property
    def address(self) -> str:
        """Where others connect to; of a client, its servers', separated by commas; empty if neither."""
        return self._native.address

    def insert(  # noqa: PLR0917 - the signature of vLLM's lookup buffers, and a timeout
        self, input_tokens: Any, roi: Any, key: Any, value: Any, hidden: Any, timeout: float | None = None
    ) -> None:
        """Inserts a copy of the tensors, which may be changed once this returns.

        It does not wait while there is place. Otherwise inserts wait in the order of their calls, those of other
        processes included. Without place for one entry, all later ones wait too, whatever their size. Ctrl-C withdraws
        an insert, unless its bytes are on their way to another process already.

        Args:
            input_tokens: `[num_tokens]`, any integer dtype, torch or numpy like all tensors here. The copy is made in
                host memory; of a torch tensor on a GPU once its current stream is done, which the caller waits for.
            roi: `[num_tokens]`, bool: which tokens count. `None`: all.
            key: Any shape and dtype, or `None`.
            value: As `key`.
            hidden: As `key`.
            timeout: Seconds to wait for place; 0 does not wait, `None` waits until there is some.

        Raises:
            CapacityError: There was no place in time. Nothing was inserted, the buffer is usable.
            ConfigError: Larger than the capacity, no token counts, or a tensor that cannot be kept; the buffer is
                usable. At a buffer of another process, also more than 4,194,304 tokens that count.
            TransportUnavailableError: A tensor in memory that this version cannot read; the buffer is usable.
            PeerLostError: A server is gone; whether the entry was inserted is not known.
            TransferTimeoutError: The server, another process, gave no sign of life by the deadline; whether the entry
                was inserted is not known, and the buffer is closed.
            ClosedError: The buffer was closed here.
        """
        _wait(self._insert(input_tokens, roi, (key, value, hidden), timeout, is_waited=True))

    def iinsert(self, input_tokens: Any, roi: Any, key: Any, value: Any, hidden: Any) -> Work[None]:
        """Begins `insert`. The tensors must not be changed until the work is done; dropping it cancels nothing."""
        return Work(self._insert(input_tokens, roi, (key, value, hidden), None, is_waited=False), lambda _: None)

    def _insert(
        self, input_tokens: Any, roi: Any, rest: tuple[Any, Any, Any], timeout: float | None, *, is_waited: bool
    ) -> _kvpipe.Work:
        described = [_described(tensor) for tensor in (input_tokens, roi, *rest)]
        tokens = _counted(input_tokens, roi)
        return self._native.insert(tokens, [(tensor.meta, tensor.data) for tensor in described], timeout, is_waited)

    def drop_select(self, input_tokens: Any, roi: Any, timeout: float | None = None) -> list[Any]:
        """Takes the entry whose tokens match best, or waits for one that matches.

        Args:
            input_tokens: `[num_tokens]`, any integer dtype; `None` takes the oldest entry, whatever its tokens.
            roi: `[num_tokens]`, bool: which tokens count. `None`: all.
            timeout: Seconds to wait; 0 asks, `None` waits until there is one.

        Returns:
            `[input_tokens, roi, key, value, hidden]` as they were inserted, in memory of their own; five times `None`
            when there was nothing in time, which includes servers that give no sign of life by then.

        Raises:
            ConfigError: No token of the query counts; the buffer is usable. At a buffer of another process, also more
                than 4,194,304 that count.
            CapacityError: Selects of this client wait already at the server, another process, 4,096 of them or with
                16,777,216 tokens together; let some end first. The buffer is usable.
            PeerLostError: A server is gone.
            ClosedError: The buffer was closed here.
        """
        native = self._select(input_tokens, roi, timeout, is_waited=True)
        return _consume(native, _wait(native))

    def idrop_select(self, input_tokens: Any, roi: Any) -> Work[list[Any]]:
        """Begins `drop_select`. A work that is dropped before its result was asked for takes nothing."""
        native = self._select(input_tokens, roi, None, is_waited=False)
        return Work(native, lambda entry: _consume(native, entry))

    def _select(self, input_tokens: Any, roi: Any, timeout: float | None, *, is_waited: bool) -> _kvpipe.Work:
        if input_tokens is None:
            if roi is not None:
                message = "roi without input_tokens: None as query takes the oldest entry, and has no roi"
                raise ConfigError(message)
            return self._native.select(None, timeout, is_waited)
        return self._native.select(_counted(input_tokens, roi), timeout, is_waited)

    def stats(self) -> LookupBufferStats:
        """Counters of this buffer."""
        info = self._native.info()
        del info["state"]
        return LookupBufferStats(**info)

    def close(self) -> None:
        """Ends the buffer; waits of other threads end with `ClosedError`. Closing twice is fine.

        Of a buffer in this process, all entries are dropped, and its clients lose it.
        """
        self._native.close()

    def __repr__(self) -> str:
        info = self._native.info()
        where = f" address={self.address}" if self.address else ""
        if info["num_entries"] is None:
            return f"<LookupBuffer client{where} {info['state']}, {info['num_waiting']} waiting>"
        content = f"{info['num_entries']} entries, {info['num_bytes']} of {info['capacity_bytes']} bytes"
        return f"<LookupBuffer{where} {info['state']}, {content}, {info['num_waiting']} waiting>"


def _wait(native: _kvpipe.Work) -> Any:
    """Waits for the end; when that is interrupted, what has not begun never will."""
    try:
        native.wait()
    except BaseException:
        native.withdraw()
        raise
    return native.result()


def _consume(native: _kvpipe.Work, entry: list[tuple[int, str, list[int], Any]] | None) -> list[Any]:
    if entry is None:
        return [None] * _NUM_TENSORS
    tensors = [rebuild((family, dtype, shape), b"" if data is None else data) for family, dtype, shape, data in entry]
    # Not before: an entry from which no tensors can be made here is left to others.
    native.take()
    return tensors


def _described(tensor: Any) -> Described:
    """A tensor in host memory; of a torch tensor on a GPU its copy there."""
    described = describe(tensor.cpu() if getattr(tensor, "is_cuda", False) else tensor)
    if isinstance(described.data, _kvpipe.CudaMemory):
        message = f"a {type(tensor).__name__} on a GPU cannot be inserted; copy it to the CPU first"
        raise TransportUnavailableError(message)
    return described


def _counted(input_tokens: Any, roi: Any) -> Any:
    """The tokens that count, as contiguous 64-bit integers."""
    tokens = _array("input_tokens", input_tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        message = f"input_tokens: expected [num_tokens] of integers, got {list(tokens.shape)} of {tokens.dtype}"
        raise ConfigError(message)
    if roi is not None:
        mask = _array("roi", roi)
        if mask.shape != tokens.shape or mask.dtype.kind != "b":
            message = (
                f"roi: expected {list(tokens.shape)} of bool like input_tokens, got {list(mask.shape)} of {mask.dtype}"
            )
            raise ConfigError(message)
        tokens = tokens[mask]
    return tokens.astype("int64", order="C")


def _array(name: str, tensor: Any) -> Any:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return tensor.detach().cpu().resolve_neg().numpy()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return tensor
    message = f"{name}: expected a torch tensor or a numpy array, got {type(tensor).__name__}"
    raise ConfigError(message)
