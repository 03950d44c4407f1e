"""Pipe: a single-direction FIFO of tensors between two processes."""

from __future__ import annotations

import importlib
import logging
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from kvpipe import _kvpipe
from kvpipe._deferred import Deferred, DeferredQueue
from kvpipe._integrity import resolve_integrity
from kvpipe._tensor import NOTHING, NUMPY, describe, rebuild
from kvpipe._transport import transport
from kvpipe.config import resolve_token, resolve_tokens
from kvpipe.exceptions import ClosedError, ConfigError, TransferTimeoutError, TransportUnavailableError
from kvpipe.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


logger = logging.getLogger(__name__)

_INTEGRITY = ("auto", "checksum", "validate", "none")
_LONGEST_BUSY_POLL_US = 1_000_000
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class PipeStats:
    """Counters of one end of a pipe.

    Attributes:
        num_tensors: Tensors sent or received, completed.
        num_bytes: Bytes of these tensors.
        in_flight: Pending operations, late ones that are not settled included.
        transport: Transport of large tensors: `cma`, `tcp`, `rc_mlx5`, …; empty before the ends are connected. A
            receiver that has got a tensor from or on a GPU names what carried that: `cuda_ipc`, or that of streams.
    """

    num_tensors: int
    num_bytes: int
    in_flight: int
    transport: str


class Pipe:
    """One end of a FIFO of tensors, made by `listen` (the receiving end) or `connect` (the sending end).

    Any thread may call any method at any time. Operations are ordered by their calls. `timeout=None` waits until the
    operation is done or the peer is lost; 0 does not wait. An operation that expires before a send has met its receive
    is withdrawn. One that expires later loses its tensor, on both sides. Either way the pipe stays usable. Where the
    peer still reads or writes the tensor's memory almost a second after the deadline, or says nothing at the deadline,
    the operation fails then, and the message says so. That memory must not be changed or used until the work is settled
    (`Work.settled`) or `close` has succeeded; it may be dropped. `stats().in_flight` counts the operation until then,
    and after a late receive later ones wait for it. A peer that stays silent for 10 s is lost. Ctrl-C interrupts every
    wait. In a forked child process, calls raise `ClosedError`.

    The pipe keeps sent tensors alive until they have left; received tensors belong to the caller. Torch tensors arrive
    as torch tensors and `None` as `None`. Numpy arrays, DLPack objects and buffers arrive as numpy arrays (`bytes` as a
    one-dimensional array of uint8).

    Where UCX has CUDA, tensors on an NVIDIA GPU are moved in place, without checksums: `integrity="auto"` validates
    them. Their memory is read or written after the work that their stream (torch's current one) had at the call, and no
    caller waits for that. When a work on such a tensor ends, its bytes are visible to all streams (docs/gpu.md).
    """

    def __init__(self, end: _kvpipe.PipeEnd, *, is_sender: bool) -> None:
        self._end = end
        self._is_sender = is_sender
        self._is_logged = False
        self._deferred = DeferredQueue()

    @classmethod
    def listen(cls, address: str = "127.0.0.1:0", token: str | None = None, *, busy_poll_us: int | None = None) -> Pipe:
        """Opens the receiving end and returns at once. Any thread may call.

        Args:
            address: `host:port`; port 0 picks a free one, see `address`.
            token: The shared secret; by default `KVPIPE_TOKEN`. Required for addresses other than loopback.
            busy_poll_us: Microseconds of polling before the pipe's thread sleeps; by default 30, and 0 on two cores or
                fewer. A longer time costs CPU and lowers latency, if a core is free for it.

        Raises:
            ConfigError: The address cannot be bound.
        """
        end = _kvpipe.PipeEnd.listen(address, resolve_tokens(token), transport(), _microseconds(busy_poll_us))
        return cls(end, is_sender=False)

    @classmethod
    def connect(
        cls,
        address: str,
        token: str | None = None,
        timeout: float = 10,
        *,
        integrity: str | None = None,
        checksum: bool | None = None,
        busy_poll_us: int | None = None,
    ) -> Pipe:
        """Opens the sending end, and waits until the receiver accepts it. Any thread may call.

        Args:
            address: The receiver's `address`.
            token: The shared secret; by default `KVPIPE_TOKEN`.
            timeout: Seconds to wait for the receiver, which may begin to listen meanwhile.
            integrity: Verification of tensors by the receiver. `checksum`: by checksums of the sender (CRC-64/NVME;
                their cost is in docs/benchmarks.md). A mismatch, for example after a change during the send, raises
                `CorruptDataError` at both ends, and the pipe continues with the next tensor. `validate`: it asks the
                sender, after the last read of a large tensor, whether the tensor is still offered. Otherwise the tensor
                is lost. What is sent in messages has checksums, unless it is on a GPU. `none`: not at all. `auto`:
                `checksum` in host memory, `validate` on a GPU, where tensors have no checksums.
            checksum: Deprecated: `True` is `integrity="auto"`, `False` is `integrity="none"`.
            busy_poll_us: As in `listen`.

        Raises:
            ConfigError: The address is not `host:port`, or the integrity is not one of these.
            ConnectError: No pipe answers there in time, or it has a sender already.
            AuthenticationError: The receiver has another token.
        """
        chosen = resolve_integrity(_INTEGRITY, integrity=integrity, checksum=checksum)
        end, connected = _kvpipe.PipeEnd.connect(
            address, resolve_token(token), transport(), chosen, _microseconds(busy_poll_us), timeout
        )
        try:
            Work(connected, lambda _: None).wait()
        except BaseException:
            end.stop()
            raise
        pipe = cls(end, is_sender=True)
        pipe._log_opened()
        return pipe

    def send_tensor(self, tensor: Any, timeout: float | None = None) -> None:
        """Sends a tensor, and returns when it may be changed. Several threads may send at once.

        A small tensor (32 KiB or less) has then been copied, a larger one has been received. So two sides that only
        send large tensors to each other deadlock, as with torch.distributed. After Ctrl-C the send continues.

        Args:
            tensor: A torch tensor on the CPU or an NVIDIA GPU, a numpy array, `None`, or another object with DLPack,
                the buffer protocol or `__cuda_array_interface__`; any shape and dtype. A tensor that is not contiguous
                is copied first.
            timeout: Seconds; see the class.

        Raises:
            TransferTimeoutError: Not done in time; the message says whether the pipe is usable, and whether the tensor
                may still be read. Where it may, it is not known whether the tensor is received.
            CorruptDataError: (above 32 KiB) the checksum did not match; the pipe is usable.
            PeerLostError: The receiver was lost; the pipe is closed.
            ClosedError: The pipe was closed here.
            ConfigError, TransportUnavailableError: The tensor cannot be sent, such as one on a GPU where UCX has no
                CUDA; the pipe is usable.
        """
        native = self._send(tensor, timeout, is_waited=True)
        native.wait()
        native.result()

    def isend_tensor(self, tensor: Any, timeout: float | None = None) -> Work[None]:
        """Begins to send a tensor, which must not be changed until the work is settled.

        The call fixes the tensor's position in the pipe, also among several threads. The pipe keeps the tensor alive;
        dropping the work does not cancel the send. Without an expired `timeout` a work that is done is settled.

        Args:
            tensor: As in `send_tensor`.
            timeout: Seconds until the send fails; see the class.

        Raises:
            As `send_tensor` for an unsuitable tensor; the work raises other errors.
        """
        return Work(self._send(tensor, timeout, is_waited=False), lambda _: None)

    def _send(self, tensor: Any, timeout: float | None, *, is_waited: bool) -> _kvpipe.Work | Deferred:
        if not self._is_sender:
            message = "this is the receiving end of the pipe; it cannot send"
            raise ConfigError(message)
        described = describe(tensor)
        if described.ready is None and self._deferred.is_idle:
            return self._end.send(described.meta, described.data, timeout, is_waited)

        def begin(left: float | None) -> _kvpipe.Work:
            return self._end.send(described.meta, described.data, left, is_waited=False)

        return self._deferred.post(described.ready, begin, timeout)

    def recv_tensor(self, out: Any = None, device: str | None = None, timeout: float | None = None) -> Any:
        """Receives the next tensor. Several threads may receive at once; each tensor goes to one of them.

        After Ctrl-C it receives no tensor; a tensor that was being moved at that moment is lost.

        Args:
            out: The destination: a contiguous, writable torch tensor, numpy array, DLPack object, buffer or object with
                `__cuda_array_interface__`, on the host or on an NVIDIA GPU. Its kind (torch, or numpy for all others),
                dtype and shape must match the sent tensor. Without it, the returned tensor owns memory that the pipe
                reuses after the tensor is freed.
            device: Device of the result, without `out`: `"cpu"` (or `None`), or a GPU such as `"cuda:0"`, which needs
                torch. For a GPU, the tensor is received into host memory and copied into a torch tensor, on the current
                stream of the thread that asks for the result; `out` avoids that copy.
            timeout: Seconds; see the class.

        Returns:
            The tensor, or `out`.

        Raises:
            EndOfPipeError: The sender has closed the pipe, and everything was received.
            ConfigError: `out` does not match; no tensor was consumed, and the pipe is usable.
            TransportUnavailableError: `out` or `device` cannot be reached, such as a GPU where UCX has no CUDA; no
                tensor was consumed.
            CorruptDataError: The tensor does not match its checksum; it was consumed, and the pipe is usable.
            TransferTimeoutError: Not done in time; the message says whether the pipe is usable, and whether `out` may
                still be written to. The next tensor is received when that has ended.
            PeerLostError: The sender was lost; the pipe is closed.
        """
        bring = None if device is None else _bringing(out, device)
        native = self._receive(out, timeout, is_waited=True)
        try:
            native.wait()
        except BaseException:
            if not native.is_completed():  # Ctrl-C, or another exception of a signal handler
                self._withdraw(native)
            raise
        received = native.result()
        self._log_opened()
        if bring is not None:
            return bring(received)
        return _rebuild(received) if out is None else out

    def irecv_tensor(self, out: Any = None, device: str | None = None, timeout: float | None = None) -> Work[Any]:
        """Begins to receive the next tensor.

        The call fixes the order of the receives, also among several threads. The pipe keeps `out` alive. Dropping the
        work does not cancel the receive: the tensor is received and lost.

        Args:
            out: As in `recv_tensor`. It must not be used until the work is settled.
            device: As in `recv_tensor`.
            timeout: Seconds until the receive fails; see the class.

        Raises:
            As `recv_tensor` for an unsuitable `out` or `device`; the work raises other errors.
        """
        bring = None if device is None else _bringing(out, device)
        convert = bring or (_rebuild if out is None else lambda _: out)
        return Work(self._receive(out, timeout, is_waited=False), convert)

    def _receive(self, out: Any, timeout: float | None, *, is_waited: bool) -> _kvpipe.Work | Deferred:
        if self._is_sender:
            message = "this is the sending end of the pipe; it cannot receive"
            raise ConfigError(message)
        self._log_opened()
        place, ready = None, None
        if out is not None:
            described = describe(out, must_be_in_place=True)
            place, ready = (described.meta, described.data), described.ready
        if ready is None and self._deferred.is_idle:
            return self._end.receive(place, timeout, is_waited)

        def begin(left: float | None) -> _kvpipe.Work:
            return self._end.receive(place, left, is_waited=False)

        return self._deferred.post(ready, begin, timeout)

    def _withdraw(self, native: _kvpipe.Work | Deferred) -> None:
        if isinstance(native, Deferred):
            native.withdraw(ClosedError("the receive was withdrawn; the pipe is usable"))
        begun = native.begun if isinstance(native, Deferred) else native
        if begun is not None:
            self._end.withdraw(begun)

    def _log_opened(self) -> None:
        """Logs the transport once, as soon as the two ends are connected."""
        if self._is_logged or not (transport := self.transport):
            return
        self._is_logged = True
        logger.info("pipe.open peer=%s transport=%s", self.peer, transport)
        if advice := self._end.advice:
            logger.warning("pipe.slow peer=%s %s", self.peer, advice)

    def close(self, timeout: float | None = 10) -> None:
        """Closes the pipe. Several threads may call, also repeatedly.

        The sender returns once everything has been received, and nothing reads the memory of a late tensor any more.
        The receiver discards unreceived tensors, and the sender's operations fail.

        Raises:
            ConfigError: `timeout` is not a number of seconds; the pipe is unchanged.
            TransferTimeoutError: The pipe is closed, but the receiver did not receive everything in time; or UCX has
                not ended reads into the memory of late receives: do not use that until another `close` succeeds.
            PeerLostError: The receiver was lost before it received everything.
        """
        is_drained, left = self._drain(timeout)
        try:
            closed = self._end.close(left)
        except ClosedError:
            return  # closed before, or made before fork(): the parent closes it
        try:
            if closed is not None:
                Work(closed, lambda _: None).wait()
        finally:
            self._end.stop()
        if not is_drained:
            message = "the stream of a tensor was not done in time; the pipe is closed, the tensor was not sent"
            raise TransferTimeoutError(message)

    def _drain(self, timeout: float | None) -> tuple[bool, float | None]:
        """Waits for the streams of sent tensors. Returns true if they are done, and the remaining time."""
        is_drained, left = True, timeout
        if self._is_sender and not self._deferred.is_idle:
            begun = time.monotonic()
            is_drained = self._deferred.drain(timeout)
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        self._deferred.close()
        return is_drained, left

    @property
    def address(self) -> str | None:
        """The address for the sender, as `host:port`; `None` at the sending end."""
        return self._end.address

    @property
    def peer(self) -> str:
        """The other end's address; empty before the ends are connected."""
        return self._end.info()[1]

    @property
    def transport(self) -> str:
        """Transport of large tensors; empty before the ends are connected."""
        return self._end.info()[2]

    def stats(self) -> PipeStats:
        """Returns counters of this end. Any thread may call at any time."""
        _, _, transport, num_tensors, num_bytes, in_flight = self._end.info()
        return PipeStats(num_tensors, num_bytes, in_flight, transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._deferred.close()
            self._end.stop()

    def __repr__(self) -> str:
        state, peer, transport, _, _, in_flight = self._end.info()
        role = "sender" if self._is_sender else "receiver"
        where = f" peer={peer}" if peer else f" address={self.address}"
        over = f" transport={transport}" if transport else ""
        return f"<Pipe {role}{where}{over} {state}, {in_flight} in flight>"


def _microseconds(busy_poll_us: int | None) -> int | None:
    if busy_poll_us is not None and not 0 <= busy_poll_us <= _LONGEST_BUSY_POLL_US:
        message = f"busy_poll_us={busy_poll_us}: expected 0 to {_LONGEST_BUSY_POLL_US}"
        raise ConfigError(message)
    return busy_poll_us


def _bringing(out: Any, device: object) -> Callable[[Any], Any] | None:
    """Copies what was received to its device; `None` if that is the CPU."""
    name = str(device)
    if not _DEVICE.fullmatch(name):
        message = f"device={name!r}: expected None, 'cpu', or a GPU such as 'cuda:0'"
        raise ConfigError(message)
    if name == "cpu":
        return None
    if out is not None:
        message = f"device={name!r} with out=: the tensor is received into out, wherever that is"
        raise ConfigError(message)
    torch = _torch_for(name)
    return lambda received: _moved(torch, received, name)


def _torch_for(device: str) -> Any:
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        message = f"device={device!r} needs torch, which allocates there; install it, or receive into out="
        raise TransportUnavailableError(message) from error
    if not torch.cuda.is_available():
        message = f"device={device!r}: torch sees no CUDA device; receive to the CPU, or install torch for CUDA"
        raise TransportUnavailableError(message)
    return torch


def _moved(torch: Any, received: tuple[int, str, list[int], Any], device: str) -> Any:
    tensor = _rebuild(received)
    if received[0] == NOTHING:
        return None
    return (torch.from_numpy(tensor) if received[0] == NUMPY else tensor).to(device)


def _rebuild(received: tuple[int, str, list[int], Any]) -> Any:
    family, dtype, shape, data = received
    return rebuild((family, dtype, shape), data if data is not None else b"")
