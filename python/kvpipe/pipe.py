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
from kvpipe._tensor import NOTHING, NUMPY, describe, rebuild
from kvpipe._transport import transport
from kvpipe.config import resolve_token
from kvpipe.exceptions import ClosedError, ConfigError, TransferTimeoutError, TransportUnavailableError
from kvpipe.work import Work

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType


logger = logging.getLogger(__name__)

_LONGEST_BUSY_POLL_US = 1_000_000
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class PipeStats:
    """Counters of a pipe's end.

    Attributes:
        num_tensors: Tensors sent or received, completed.
        num_bytes: Their bytes.
        in_flight: Operations that are not done.
        transport: What carries large tensors: `cma`, `tcp`, `rc_mlx5`, …; empty before the peers have met.
    """

    num_tensors: int
    num_bytes: int
    in_flight: int
    transport: str


class Pipe:
    """One end of a FIFO of tensors: made by `listen` (the receiving end) or `connect` (the sending end).

    Any thread may call any method, also while others wait in theirs; operations take their place in the order of the
    calls. `timeout=None` waits until the operation is done or the peer is lost, 0 takes what is there already. An
    operation that expires before the two sides have met is withdrawn and the pipe stays usable; one that expires later
    closes the pipe. Ctrl-C interrupts every wait. A process that was forked from the one that made the pipe gets
    `ClosedError`.

    What is sent is kept alive until it has left, and what is received is the caller's alone. Torch tensors arrive as
    torch tensors, `None` as `None`, and all else as numpy arrays: numpy's own, and what speaks DLPack or the buffer
    protocol (`bytes` as a one-dimensional array of uint8).

    Tensors on an NVIDIA GPU are moved in place, without checksums, where UCX has CUDA. What their stream (torch's
    current one) has been given to do when a method is called is done before their memory is read or written, which no
    caller waits for. A work on one is done when its bytes are there for all streams. None of this has run on a GPU yet
    (docs/gpu.md).
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
            token: The shared secret; by default `KVPIPE_TOKEN`. Needed for addresses other than loopback.
            busy_poll_us: Microseconds for which the pipe's thread looks for more before it sleeps; by default 30,
                and 0 on two cores or fewer. More of it costs CPU and saves latency, if a core is free for it.

        Raises:
            ConfigError: The address cannot be bound.
            TransportUnavailableError: There is no usable UCX.
        """
        end = _kvpipe.PipeEnd.listen(address, resolve_token(token), transport(), _microseconds(busy_poll_us))
        return cls(end, is_sender=False)

    @classmethod
    def connect(
        cls,
        address: str,
        token: str | None = None,
        timeout: float = 10,
        *,
        checksum: bool = True,
        busy_poll_us: int | None = None,
    ) -> Pipe:
        """Opens the sending end and waits until the receiver has accepted it. Any thread may call.

        Args:
            address: The receiver's `address`.
            token: The shared secret; by default `KVPIPE_TOKEN`.
            timeout: Seconds until the receiver must have accepted.
            checksum: Whether the receiver compares each tensor with a checksum computed here (CRC-64/NVME; the
                cost is in docs/benchmarks.md). A tensor that differs, as after a change while it was sent, raises
                `CorruptDataError` at both ends, and the pipe goes on with the next.
            busy_poll_us: As in `listen`.

        Raises:
            ConfigError: The address is no `host:port`.
            ConnectError: Nobody answers there, or the pipe has a sender already.
            AuthenticationError: The receiver has another token.
            TransportUnavailableError: There is no usable UCX.
        """
        end, connected = _kvpipe.PipeEnd.connect(
            address, resolve_token(token), transport(), checksum, _microseconds(busy_poll_us), timeout
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
        """Sends a tensor; returns when it may be changed. Several threads may send at once.

        A small tensor (32 KiB or less) has then been copied, a larger one has been received: two sides that only
        send large tensors to each other wait for ever, as with torch.distributed. Interrupted by Ctrl-C, the tensor
        goes on being sent.

        Args:
            tensor: A torch tensor on the CPU or an NVIDIA GPU, a numpy array, `None`, or what else speaks DLPack, the
                buffer protocol or `__cuda_array_interface__`; any shape and dtype. One that is not contiguous is
                copied first.
            timeout: Seconds; see the class.

        Raises:
            TransferTimeoutError: Not done in time; the message says whether the pipe is usable.
            CorruptDataError: (above 32 KiB) it arrived with another checksum; the pipe is usable.
            PeerLostError: The receiver is gone; the pipe is closed.
            ClosedError: The pipe was closed here.
            ConfigError, TransportUnavailableError: This tensor cannot be sent, as one on a GPU where UCX has no CUDA;
                the pipe is usable.
        """
        native = self._send(tensor, timeout, is_waited=True)
        native.wait()
        native.result()

    def isend_tensor(self, tensor: Any) -> Work[None]:
        """Begins to send a tensor, which must not be changed until the work is done.

        Its place in the pipe is taken when this returns, also among several threads. The tensor is kept alive; dropping
        the work cancels nothing.

        Raises:
            As `send_tensor` for what is wrong with the tensor; the rest comes from the work.
        """
        return Work(self._send(tensor, None, is_waited=False), lambda _: None)

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

        Interrupted by Ctrl-C, it takes no tensor; one that was being moved at that moment is lost.

        Args:
            out: A contiguous, writable torch tensor, numpy array, DLPack object, buffer or object with
                `__cuda_array_interface__` to receive into, on the host or on an NVIDIA GPU. It must be of the kind
                (torch, or numpy for all others), dtype and shape of what comes. Without it the returned tensor owns
                memory that the pipe uses again once the tensor is let go.
            device: Where the tensor is to be, without `out`: `"cpu"` (or `None`), or a GPU such as `"cuda:0"`, which
                takes torch. The latter is received into host memory and copied, on the current stream of whoever takes
                the result, into a torch tensor: `out` saves that copy.
            timeout: Seconds; see the class.

        Returns:
            The tensor, or `out`.

        Raises:
            EndOfPipeError: The sender has closed and everything was received.
            ConfigError: `out` does not match; nothing was consumed, the pipe is usable.
            TransportUnavailableError: `out` or `device` cannot be reached from here, as a GPU where UCX has no CUDA;
                nothing was consumed.
            CorruptDataError: What came differs from its checksum; it is consumed, the pipe is usable.
            TransferTimeoutError: Not done in time; the message says whether the pipe is usable.
            PeerLostError: The sender is gone; the pipe is closed.
        """
        bring = None if device is None else _bringing(out, device)
        native = self._receive(out, timeout, is_waited=True)
        try:
            native.wait()
        except BaseException:
            if not native.is_completed():  # Ctrl-C, or what else a signal handler raises
                self._withdraw(native)
            raise
        received = native.result()
        self._log_opened()
        if bring is not None:
            return bring(received)
        return _rebuild(received) if out is None else out

    def irecv_tensor(self, out: Any = None, device: str | None = None) -> Work[Any]:
        """Begins to receive the next tensor.

        Its place among the receives is taken when this returns, also among several threads. `out` is kept alive;
        dropping the work cancels nothing: the tensor is received and lost.

        Raises:
            As `recv_tensor` for what is wrong with `out` or `device`; the rest comes from the work.
        """
        bring = None if device is None else _bringing(out, device)
        convert = bring or (_rebuild if out is None else lambda _: out)
        return Work(self._receive(out, None, is_waited=False), convert)

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
        """Logs once which way the tensors take, as soon as the two ends have met."""
        if self._is_logged or not (transport := self.transport):
            return
        self._is_logged = True
        logger.info("pipe.open peer=%s transport=%s", self.peer, transport)
        if advice := self._end.advice:
            logger.warning("pipe.slow peer=%s %s", self.peer, advice)

    def close(self, timeout: float | None = 10) -> None:
        """Ends the pipe. Closing twice is fine, also from several threads.

        The sender returns once everything has been received. The receiver discards what it has not received, and
        the sender's operations fail.

        Raises:
            ConfigError: `timeout` is no number of seconds; the pipe is as it was.
            TransferTimeoutError: The receiver did not take everything in time; the pipe is closed all the same.
            PeerLostError: The receiver is gone, and with it what it had not received.
        """
        is_drained, left = self._drain(timeout)
        try:
            closed = self._end.close(left)
        except ClosedError:
            return  # closed before, or made before fork(): the parent's to close
        try:
            if closed is not None:
                Work(closed, lambda _: None).wait()
        finally:
            self._end.stop()
        if not is_drained:
            message = "the stream of a tensor was not done in time; the pipe is closed, the tensor was not sent"
            raise TransferTimeoutError(message)

    def _drain(self, timeout: float | None) -> tuple[bool, float | None]:
        """Has the sender's streams done first: whether they are, and what is left of the time."""
        is_drained, left = True, timeout
        if self._is_sender and not self._deferred.is_idle:
            begun = time.monotonic()
            is_drained = self._deferred.drain(timeout)
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begun))
        self._deferred.close()
        return is_drained, left

    @property
    def address(self) -> str | None:
        """Where a sender connects to, as `host:port`; `None` at the sending end."""
        return self._end.address

    @property
    def peer(self) -> str:
        """The other end's address; empty before the two have met."""
        return self._end.info()[1]

    @property
    def transport(self) -> str:
        """What carries large tensors; empty before the two ends have met."""
        return self._end.info()[2]

    def stats(self) -> PipeStats:
        """Counters of this end; any thread may ask, at any time."""
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
        road = f" transport={transport}" if transport else ""
        return f"<Pipe {role}{where}{road} {state}, {in_flight} in flight>"


def _microseconds(busy_poll_us: int | None) -> int | None:
    if busy_poll_us is not None and not 0 <= busy_poll_us <= _LONGEST_BUSY_POLL_US:
        message = f"busy_poll_us={busy_poll_us}: expected 0 to {_LONGEST_BUSY_POLL_US}"
        raise ConfigError(message)
    return busy_poll_us


def _bringing(out: Any, device: object) -> Callable[[Any], Any] | None:
    """What brings to a device what was received; `None` if that is the CPU."""
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
