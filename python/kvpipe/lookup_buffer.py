"""LookupBuffer: KV entries looked up by their tokens, each delivered once."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from kvpipe import _kvpipe
from kvpipe._closing import Closing
from kvpipe._integrity import resolve_integrity
from kvpipe._tensor import Described, as_numpy, describe, rebuild
from kvpipe._transport import transport
from kvpipe.config import resolve_token, resolve_tokens
from kvpipe.exceptions import ConfigError, TransportUnavailableError
from kvpipe.work import Work

_NUM_TENSORS = 5
_INTEGRITY = ("auto", "checksum", "none")
_NO_VALIDATE = "before an entry is delivered, its server is asked in any case whether it is still leased"


@dataclass(frozen=True)
class LookupBufferStats:
    """Counters of a lookup buffer. Counters that only the server knows are `None` at a client.

    Attributes:
        num_inserted: Inserted entries; for a server, those of its clients included.
        num_taken: Consumed entries; for a server, those of its clients included.
        num_waiting: Inserts that wait for space and selects that wait for an entry; for a client, inserts that its
            server has not answered.
        num_entries: Entries that can be selected.
        num_leased: Entries on their way to a consumer, or not yet accepted by it.
        num_bytes: Size of all entries, leased ones and pending inserts included: see `LookupBuffer`.
        capacity_bytes: Limit of `num_bytes`.
        transport: Transport of large tensors between client and servers: `cma`, `tcp`, `rc_mlx5`, …; empty within one
            process.
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
    """A buffer of KV cache entries: producers `insert` them, consumers `drop_select` them by tokens.

    An entry has five tensors: input tokens, region of interest, key, value, hidden states. `LookupBuffer(...)` keeps
    entries in this process, and `serve` offers them to other processes. `LookupBuffer.connect(...)` uses the buffers of
    other processes. Each entry is delivered to exactly one consumer and then dropped. If the consumer dies before it
    has all bytes, the entry returns to its old position.

    The tokens of an entry or query are those of `input_tokens` where `roi` is true. They match if the shorter sequence
    is a prefix of the longer one. The longest match wins, then the oldest entry.

    Any thread may call. Ctrl-C interrupts every wait. In a forked child process, every call raises `ClosedError`.

    Args:
        capacity_bytes: Limit for the size of all entries. An entry counts its tensors with dtypes and shapes, 8 bytes
            for each of its tokens, and 2 KiB of overhead.
    """

    def __init__(self, capacity_bytes: int = 1 << 30) -> None:
        if not isinstance(capacity_bytes, int) or capacity_bytes < 1:
            message = f"capacity_bytes={capacity_bytes!r}: expected a number of bytes, 1 or more"
            raise ConfigError(message)
        self._native = _kvpipe.LookupBuffer(capacity_bytes)

    @classmethod
    def connect(
        cls,
        *addresses: str,
        token: str | None = None,
        timeout: float = 10,
        integrity: str | None = None,
        checksum: bool | None = None,
    ) -> LookupBuffer:
        """Connects to buffers that other processes serve.

        With several addresses, inserts go to the first server and selects to all. The first server with a match
        delivers its longest one. When one server is lost, calls raise `PeerLostError`, and entries that have not
        arrived stay with their servers.

        Args:
            addresses: The servers' `address`, one or more.
            token: The shared secret; by default `KVPIPE_TOKEN`.
            timeout: Seconds to wait for all servers, which may begin to serve meanwhile.
            integrity: Verification of large inserted tensors by the server: `checksum` (as of `Pipe.connect`) or
                `none`; `auto` is `checksum`. Small tensors are always verified.
            checksum: Deprecated: `True` is `integrity="auto"`, `False` is `integrity="none"`.

        Raises:
            ConnectError: A server does not answer in time.
            AuthenticationError: A server has another token.
        """
        chosen = resolve_integrity(_INTEGRITY, integrity=integrity, checksum=checksum, no_validate=_NO_VALIDATE)
        native, connected = _kvpipe.LookupBuffer.connect(
            addresses, resolve_token(token), transport(), chosen != "none", timeout
        )
        try:
            Work(connected, lambda _: None).wait()
        except BaseException:
            native.close()
            raise
        buffer = cls.__new__(cls)
        buffer._native = native  # noqa: SLF001 - of this class
        return buffer

    def serve(
        self,
        address: str = "127.0.0.1:0",
        token: str | None = None,
        *,
        integrity: str | None = None,
        checksum: bool | None = None,
    ) -> None:
        """Offers this buffer to other processes; returns at once.

        Args:
            address: `host:port`; port 0 picks a free one, see the property `address`.
            token: The shared secret; by default `KVPIPE_TOKEN`. Required for addresses other than loopback.
            integrity: Verification of large tensors by consumers: `checksum` or `none`; `auto` is `checksum`. Small
                tensors are always verified.
            checksum: As in `connect`.

        Raises:
            ConfigError: The address cannot be bound, or the buffer is served already or is a client.
        """
        chosen = resolve_integrity(_INTEGRITY, integrity=integrity, checksum=checksum, no_validate=_NO_VALIDATE)
        self._native.serve(address, resolve_tokens(token), transport(), chosen != "none")

    @property
    def address(self) -> str:
        """The address for clients; at a client, the servers' addresses, separated by commas; otherwise empty."""
        return self._native.address

    def insert(  # noqa: PLR0917 - the signature of vLLM's lookup buffers, and a timeout
        self, input_tokens: Any, roi: Any, key: Any, value: Any, hidden: Any, timeout: float | None = None
    ) -> None:
        """Inserts a copy of the tensors, which may be changed once this returns.

        It waits only if there is no space. Inserts wait in the order of their calls, those of other processes included.
        While one entry waits, all later ones wait too, whatever their size. Ctrl-C withdraws an insert, unless its
        bytes are already being sent to another process.

        Args:
            input_tokens: `[num_tokens]`, any integer dtype; a torch tensor or numpy array, like all tensors here. The
                copy is in host memory; for a torch tensor on a GPU, the caller waits for its current stream first.
            roi: `[num_tokens]`, bool: which tokens count; `None` means all.
            key: Any shape and dtype, or `None`.
            value: As `key`.
            hidden: As `key`.
            timeout: Seconds to wait for space; 0 does not wait, `None` waits without limit. The transfer to another
                process may take up to 0.45 s longer; then it is cancelled.

        Raises:
            CapacityError: There was no space in time. Nothing was inserted, and the buffer is usable.
            ConfigError: The entry is larger than the capacity, no token counts, or a tensor cannot be stored; the
                buffer is usable. A buffer of another process also refuses more than 4,194,304 counted tokens.
            TransportUnavailableError: A tensor is in memory that cannot be read; the buffer is usable.
            PeerLostError: A server was lost; the entry may have been inserted.
            TransferTimeoutError: The transfer took longer: nothing was inserted, and the buffer is usable. Or the
                server has not answered that almost a second after the deadline, or says nothing at the deadline: the
                tensors may still be read, and the entry may have been inserted. They may be dropped, and must not be
                changed until `stats().num_waiting` does not count the insert any more. The message says which.
            ClosedError: The buffer was closed here.
        """
        _wait(self._insert(input_tokens, roi, (key, value, hidden), timeout, is_waited=True))

    def iinsert(self, input_tokens: Any, roi: Any, key: Any, value: Any, hidden: Any) -> Work[None]:
        """Begins `insert`. The tensors must not be changed until the work is done; dropping it does not cancel it."""
        return Work(self._insert(input_tokens, roi, (key, value, hidden), None, is_waited=False), lambda _: None)

    def _insert(
        self, input_tokens: Any, roi: Any, rest: tuple[Any, Any, Any], timeout: float | None, *, is_waited: bool
    ) -> _kvpipe.Work:
        described = [_described(tensor) for tensor in (input_tokens, roi, *rest)]
        tokens = _counted(input_tokens, roi)
        return self._native.insert(tokens, [(tensor.meta, tensor.data) for tensor in described], timeout, is_waited)

    def drop_select(self, input_tokens: Any, roi: Any, timeout: float | None = None) -> list[Any]:
        """Consumes the entry with the longest match, or waits for a match.

        Args:
            input_tokens: `[num_tokens]`, any integer dtype; `None` consumes the oldest entry, whatever its tokens.
            roi: `[num_tokens]`, bool: which tokens count; `None` means all.
            timeout: Seconds to wait; 0 does not wait, `None` waits without limit.

        Returns:
            `[input_tokens, roi, key, value, hidden]` as they were inserted, in their own memory. Five times `None` if
            there was no match in time, or if a server did not answer probes by then.

        Raises:
            ConfigError: No token of the query counts; the buffer is usable. A buffer of another process also refuses
                more than 4,194,304 counted tokens.
            CapacityError: Too many selects of this client wait at the server: 4,096, or 16,777,216 tokens in total. Let
                some end first. The buffer is usable.
            PeerLostError: A server was lost.
            ClosedError: The buffer was closed here.
        """
        native = self._select(input_tokens, roi, timeout, is_waited=True)
        return _consume(native, _wait(native))

    def idrop_select(self, input_tokens: Any, roi: Any) -> Work[list[Any]]:
        """Begins `drop_select`. A work that is dropped before its result is read consumes no entry."""
        native = self._select(input_tokens, roi, None, is_waited=False)
        return Work(native, lambda entry: _consume(native, entry))

    def peek(self, input_tokens: Any, roi: Any, timeout: float | None = None) -> list[Any]:
        """Returns the entry that `drop_select` would consume, and leaves it in its place.

        The entry is hidden from other calls while its bytes are on their way. Arguments, results and errors are those
        of `drop_select`.
        """
        return _rebuilt(_wait(self._select(input_tokens, roi, timeout, is_waited=True, is_peek=True)))

    def _select(
        self, input_tokens: Any, roi: Any, timeout: float | None, *, is_waited: bool, is_peek: bool = False
    ) -> _kvpipe.Work:
        if input_tokens is None:
            if roi is not None:
                message = "roi without input_tokens: a query of None consumes the oldest entry, and has no roi"
                raise ConfigError(message)
            return self._native.select(None, timeout, is_waited, is_peek)
        return self._native.select(_counted(input_tokens, roi), timeout, is_waited, is_peek)

    def stats(self) -> LookupBufferStats:
        """Returns counters of this buffer."""
        info = self._native.info()
        del info["state"]
        return LookupBufferStats(**info)

    def close(self) -> None:
        """Closes the buffer; waits of other threads end with `ClosedError`. A second call does nothing.

        A buffer in this process drops all entries, and its clients lose it.
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
    """Waits for the end; an interrupted wait withdraws the operation if it has not begun."""
    try:
        native.wait()
    except BaseException:
        native.withdraw()
        raise
    return native.result()


def _consume(native: _kvpipe.Work, entry: list[tuple[int, str, list[int], Any]] | None) -> list[Any]:
    tensors = _rebuilt(entry)
    if entry is not None:
        # Last, so that an entry from which no tensors can be made stays available to other consumers.
        native.take()
    return tensors


def _rebuilt(entry: list[tuple[int, str, list[int], Any]] | None) -> list[Any]:
    if entry is None:
        return [None] * _NUM_TENSORS
    return [rebuild((family, dtype, shape), b"" if data is None else data) for family, dtype, shape, data in entry]


def _described(tensor: Any) -> Described:
    """Describes a tensor in host memory; a torch tensor on a GPU is copied there."""
    described = describe(tensor.cpu() if getattr(tensor, "is_cuda", False) else tensor)
    if isinstance(described.data, _kvpipe.CudaMemory):
        message = f"a {type(tensor).__name__} on a GPU cannot be inserted; copy it to the CPU first"
        raise TransportUnavailableError(message)
    return described


def _counted(input_tokens: Any, roi: Any) -> Any:
    """Returns the counted tokens as contiguous 64-bit integers."""
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
        return as_numpy(tensor.detach().cpu().resolve_neg())
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(tensor, numpy.ndarray):
        return tensor
    message = f"{name}: expected a torch tensor or a numpy array, got {type(tensor).__name__}"
    raise ConfigError(message)
