"""The native part of kvpipe. Not public: `kvpipe.Pipe`, `kvpipe.Agent` and `kvpipe.control` are built on it.

Ids (`handoff`, `incarnation`) are 16 bytes. Timeouts are seconds; `None` waits without end. Memory is handed in as an
object with a contiguous buffer of bytes, which is kept alive until the operation has let go of it.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias, final

__all__ = [
    "Agent",
    "CacheLayers",
    "Completions",
    "Control",
    "CudaEvent",
    "CudaMemory",
    "LookupBuffer",
    "ManualEvent",
    "OpenedValue",
    "Peer",
    "PipeEnd",
    "Plan",
    "ReadyBlocks",
    "ReceivedBuffer",
    "Region",
    "RespConnection",
    "RespSubscription",
    "RespTls",
    "RespWaiter",
    "StoreClient",
    "StoreServer",
    "Trace",
    "Transport",
    "Work",
    "__version__",
    "begin_log",
    "checksums",
    "cuda_device_of",
    "cuda_is_exportable",
    "drain_log",
    "has_rdma_devices",
    "joined_checksum",
    "remedy_of_difference",
    "serde_copy",
    "serde_decode",
    "serde_encode",
    "serde_max_bytes",
    "ucx_info",
]

__version__: str
"""Of the build: that of the workspace."""

# One token, or the current one and the next.
_ListenerTokens: TypeAlias = bytes | tuple[bytes, bytes]
_TensorMeta: TypeAlias = tuple[int, str, Sequence[int]]
"""`(family, dtype, shape)`: family 0 is `None`, 1 torch, 2 numpy."""

_KVLayout: TypeAlias = tuple[str, str, Sequence[int]]
"""`(dtype, packing, shape)` of `kvpipe.store.serde.Layout`, for the codecs that take it."""

def begin_log(level: int) -> int | None:
    """Gives the first caller in a process a descriptor that is readable after something has been queued for the log.

    The native part keeps it open. Others get `None`.

    Args:
        level: Of the logger `kvpipe`. Less is not queued, except warnings.

    Raises:
        OSError: The process may open no more descriptors.
    """

def checksums(memory: object, starts: Sequence[int], num_bytes: int) -> list[int]:
    """The checksums (CRC-64/NVME) that pipes prove tensors by, of `num_bytes` bytes from each start. Releases the GIL.

    Raises:
        ConfigError: The memory is not contiguous, or ends before.
    """

def joined_checksum(beginning: int, rest: int, num_bytes: int) -> int:
    """The checksum of bytes from those of their beginning and of the `num_bytes` bytes after it."""

def cuda_device_of(address: int) -> int:
    """The GPU, as the CUDA driver counts them, that an address belongs to.

    Raises:
        TransportUnavailableError: There is no CUDA driver, or the address is none of a GPU's.
    """

def cuda_is_exportable(address: int) -> bool:
    """True if other processes can open this CUDA memory by IPC handles, as that of cudaMalloc."""

def drain_log(level: int) -> tuple[list[tuple[int, str, str]], int]:
    """Takes what is queued for the log.

    Returns:
        Level, logger and text of each record; and how many records were lost because too many waited.

    Args:
        level: Of the logger `kvpipe`, from now on.
    """

def serde_copy(data: object, out: object) -> None:
    """Copies all bytes. Releases the GIL.

    Raises:
        ConfigError: The sizes differ, or a memory is not contiguous or read-only.
    """

def serde_decode(codec: str, layout: _KVLayout, data: object, out: object) -> None:
    """Decodes a stream into `out`, which has the chunk's size. Releases the GIL.

    Raises:
        ConfigError: The codec or layout is not known, or a memory has another size.
        CorruptDataError: The stream is another's or was changed. What is in `out` must not be used.
    """

def serde_encode(codec: str, layout: _KVLayout, data: object, out: object) -> int:
    """Encodes a chunk into `out`, which has `serde_max_bytes`. Releases the GIL.

    Returns:
        Size of the stream.

    Raises:
        ConfigError: As `serde_decode`, or the KV has a value that is not finite.
    """

def serde_max_bytes(codec: str, layout: _KVLayout) -> int:
    """The largest size of a stream.

    Raises:
        ConfigError: The codec or layout is not known.
    """

def ucx_info(wheel_dir: str | Path | None = None) -> dict[str, Any]:
    """Loads UCX and tells `version`, `path`, `has_cuda`.

    Raises:
        TransportUnavailableError: There is no UCX, or it is too old; the message names what was tried.
    """

def has_rdma_devices() -> bool:
    """True if this machine has RDMA devices."""

def remedy_of_difference(field: str, ours: str, theirs: str) -> str | None:
    """Remedy for the values of a field of two fingerprints that differ; None where no setting is known."""

@final
class CudaMemory:
    """Bytes on a GPU, an operand in place of a buffer. It keeps `owner` alive, and operations do too."""

    def __new__(cls, address: int, num_bytes: int, device: int, owner: object) -> CudaMemory: ...
    @property
    def address(self) -> int:
        """Address of the first byte."""

    @property
    def device(self) -> int:
        """The GPU, as the CUDA driver counts them."""

    def __len__(self) -> int:
        """Number of bytes."""

@final
class CacheLayers:
    """The KV cache of each layer in host memory. Copies release the GIL once for all layers.

    A chunk has the bytes of its blocks layer by layer, and in each layer block by block.
    """

    def __new__(cls, layers: Sequence[tuple[object, int, int]]) -> CacheLayers:
        """The memory of each layer, which may be written; the distance of two blocks in it, and the bytes of a block.

        Raises:
            ConfigError: A memory is not contiguous, or is read-only.
        """

    def make_pages(self, layer: int) -> None:
        """Has the kernel make all pages of a layer, without the GIL. Their content stays.

        Raises:
            OSError: It refuses (before Linux 5.14), or has no memory left.
        """

    def gather(self, block_ids: Sequence[int], out: object) -> None:
        """Copies blocks into a chunk.

        Raises:
            ConfigError: A block is not in the cache, or the chunk ends before it.
        """

    def scatter(self, data: object, block_ids: Sequence[int], first: int) -> None:
        """Copies the blocks of a chunk from `first` on into the cache.

        Raises:
            ConfigError: As for `gather`; nothing is copied.
        """

@final
class CudaEvent:
    """The work that was queued on a stream when this was made."""

    @staticmethod
    def record(device: int, stream: int) -> CudaEvent:
        """Does not wait. The stream is a handle of the driver's, or 0, 1, 2 for the default ones.

        Raises:
            TransportUnavailableError: There is no CUDA driver, or it refused.
        """

    @staticmethod
    def record_pending(device: int, stream: int) -> CudaEvent | None:
        """As `record`; `None` if the stream has done everything.

        Raises:
            TransportUnavailableError: As `record`. A CUDA graph is being captured on the stream.
        """

    def wait(self) -> None:
        """Sleeps until the stream has done it; releases the GIL.

        Raises:
            TransportUnavailableError: The driver's answer, with the errors of the stream's own work.
        """

@final
class ManualEvent:
    """Stands in for a `CudaEvent` in tests: completed when the test says so."""

    def __new__(cls) -> ManualEvent: ...
    def complete(self, error: str | None = None) -> None:
        """Completes the work, or lets it fail with this error."""

@final
class Trace:
    """Lines in Chrome's trace format, appended by a thread of its own to a file that several processes share.

    With an empty path nothing is written, and no thread is there. `facts` are numbers of 0 or more.
    """

    def __new__(cls, path: str = "", process: str = "") -> Trace:
        """Names this process in the trace. Raises `ConfigError` when the file cannot be written."""

    @property
    def is_on(self) -> bool:
        """True if lines are written."""

    def instant(self, name: str, handoff: bytes, **facts: int) -> None:
        """Something has happened to a handoff."""

    def span(self, name: str, handoff: bytes, began_s: float, **facts: int) -> None:
        """Something has just ended that began at `began_s` of `time.monotonic()`."""

@final
class Transport:
    """Transport of pipes and agents; UCX is opened when the first of them is made."""

    @staticmethod
    def host(wheel_dir: str | Path | None) -> Transport: ...
    @staticmethod
    def memory(data_path: str) -> Transport:
        """Between objects of this process; the data path is `remote_read` or `stream`."""

@final
class Work:
    """An operation under way."""

    def is_completed(self) -> bool:
        """True if it has ended, well or not."""

    def watch(self, completions: Completions, key: int) -> bool:
        """Has its end queue `key` in `completions`; False if it has ended already. The keys of a loop differ."""

    def unwatch(self, completions: Completions, key: int) -> None:
        """Ends a watch. The key may have been queued already."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits without the GIL; False when the timeout came first. Ctrl-C interrupts."""

    def wait_settled(self, timeout: float | None = None) -> bool:
        """Waits as `wait` does, until nothing of the operation is under way."""

    def result(self) -> Any:
        """The outcome of an ended operation, or its error."""

    def take(self) -> None:
        """Makes the entry of an ended select the caller's; one that is not taken goes back when this is dropped."""

    def withdraw(self) -> None:
        """Gives up an insert or a select of a lookup buffer, if it has not met its other side."""

@final
class Completions:
    """The ended works among those that an asyncio loop watches."""

    def __new__(cls) -> Completions: ...
    def fileno(self) -> int:
        """A descriptor that is readable while there are keys to drain. It belongs to this object."""

    def drain(self) -> list[int]:
        """Removes and returns the keys of works that have ended."""

@final
class ReceivedBuffer:
    """The bytes of a received tensor, as a writable buffer that owns them."""

    def __len__(self) -> int: ...
    if sys.version_info >= (3, 12):  # before, the buffer protocol has no names in Python
        def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class PipeEnd:
    """One end of a pipe."""

    @staticmethod
    def listen(address: str, token: _ListenerTokens, transport: Transport, busy_poll_us: int | None) -> PipeEnd: ...
    @staticmethod
    def connect(
        address: str,
        token: bytes,
        transport: Transport,
        integrity: str,
        busy_poll_us: int | None,
        timeout: float,
    ) -> tuple[PipeEnd, Work]: ...
    def send(self, tensor: _TensorMeta, data: Any, timeout: float | None, is_waited: bool) -> Work:
        """With `is_waited` the caller waits for the work at once, and so moves the bytes itself."""

    def receive(self, out: tuple[_TensorMeta, Any] | None, timeout: float | None, is_waited: bool) -> Work: ...
    def withdraw(self, receive: Work) -> None:
        """Takes a receive back that has not met a tensor; one that has, goes on."""

    def close(self, timeout: float | None) -> Work | None: ...
    def stop(self) -> None: ...
    @property
    def address(self) -> str | None: ...
    @property
    def advice(self) -> str: ...
    def info(self) -> tuple[str, str, str, int, int, int]:
        """`(state, peer, transport, num_tensors, num_bytes, in_flight)`."""

@final
class LookupBuffer:
    """Entries that are found by their tokens. An entry has five tensors; its tokens are those under its roi."""

    def __new__(cls, capacity_bytes: int) -> LookupBuffer: ...
    @staticmethod
    def connect(
        addresses: Sequence[str], token: bytes, transport: Transport, is_checksummed: bool, timeout: float
    ) -> tuple[LookupBuffer, Work]: ...
    def serve(self, address: str, token: _ListenerTokens, transport: Transport, is_checksummed: bool) -> None: ...
    @property
    def address(self) -> str:
        """Address for clients, or addresses of the servers, separated by commas; empty if neither."""

    def insert(
        self, tokens: Any, tensors: Sequence[tuple[_TensorMeta, Any]], timeout: float | None, is_waited: bool
    ) -> Work:
        """`tokens` is a buffer of 64-bit integers; `is_waited` as of `PipeEnd.send`."""

    def select(self, tokens: Any, timeout: float | None, is_waited: bool, is_peek: bool) -> Work:
        """Ends with `None`, or a list of five `(family, dtype, shape, buffer or None)`. A peek leaves it there."""

    def info(self) -> dict[str, Any]: ...
    def close(self) -> None: ...

@final
class OpenedValue:
    """A value of a store that this client may read, until it releases the operation."""

    @property
    def operation(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def record(self) -> bytes: ...
    def read_parts(self, parts: Sequence[object]) -> int | None:
        """Reads it on this thread, without the GIL, if it is in the memory of a process of this host that may be read.

        Returns:
            The checksum of the bytes, if the parts have them and they match that of the commit; otherwise `None`.

        Raises:
            ConfigError: A part is not contiguous, or read-only.
        """

@final
class StoreClient:
    """A client of a store. Operations that hold something have a number, for `release`. All works are waited for.

    What the operations mean is `kvpipe.store.KVStore`.
    """

    @staticmethod
    def connect(address: str, token: bytes, transport: Transport, timeout: float) -> tuple[StoreClient, Work]: ...
    @property
    def address(self) -> str: ...
    @property
    def transport(self) -> str:
        """Data path of large values; empty until connected."""

    def exists(self, keys: Sequence[bytes]) -> Work:
        """At most 16,384 keys; ends with a list of `bool`."""

    def reserve(self, key: bytes, num_bytes: int, ttl: float | None, timeout: float | None) -> tuple[Work, int]:
        """Ends with the number of the reservation, or `None` where the key has a value or a reservation."""

    def write(self, reservation: int, data: object) -> Work: ...
    def commit(self, reservation: int, record: bytes) -> Work: ...
    def put(self, key: bytes, data: object, record: bytes, ttl: float | None) -> Work:
        """Ends with whether the value was inserted."""

    def select(self, key: bytes, timeout: float | None) -> tuple[Work, int]:
        """Ends with an `OpenedValue`, or `None`."""

    def take(self, key: bytes, lease_s: float, timeout: float | None) -> tuple[Work, int]:
        """As `select`."""

    def read(self, value: OpenedValue, out: object) -> Work: ...
    def release(self, operation: int, is_waited: bool) -> Work:
        """Ends what an operation waits for or holds; done when the server has ended it.

        `is_waited` as of `PipeEnd.send`.
        """

    def renew(self, take: int, lease_s: float) -> Work: ...
    def acknowledge(self, take: int) -> Work: ...
    def delete(self, keys: Sequence[bytes]) -> Work:
        """At most 16,384 keys; ends with how many were deleted."""

    def list(self, prefix: bytes, after: int) -> Work:
        """Ends with `([(key, num_bytes, is_leased)], next)`; 0 begins, and `None` is the end."""

    def stats(self) -> Work:
        """Ends with the counters of `kvpipe.store.StoreStats`, and `num_clients`."""

    def close(self) -> None: ...

@final
class StoreServer:
    """A store in this process that serves others."""

    def __new__(
        cls,
        address: str,
        token: _ListenerTokens,
        transport: Transport,
        capacity_bytes: int,
        quota_bytes: int | None,
        reservation_s: float,
        disk: tuple[str, int] | None,
    ) -> StoreServer: ...
    @property
    def address(self) -> str: ...
    def stats(self) -> dict[str, int]:
        """Content and counters."""

    def close(self) -> None: ...

@final
class Region:
    """Registered memory of an agent."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def is_closed(self) -> bool: ...

@final
class Peer:
    """A session of an agent."""

    @property
    def session_key(self) -> int:
        """Names the session within its agent; never used again."""

    @property
    def address(self) -> str: ...
    @property
    def transport(self) -> str: ...
    @property
    def transport_reason(self) -> str:
        """The reason that this is slower than this host allows, and the remedy; empty if it is not."""

    @property
    def lost(self) -> str | None:
        """Reason for its loss."""

    def regions(self) -> list[tuple[str, int, int, str, bool]]:
        """`(name, num_blocks, block_bytes, device, is_writable)` of each, as of now."""

    def stats(self) -> tuple[int, int, int, int, int]:
        """`(bytes_read, bytes_written, num_reads, num_writes, in_flight)`."""

@final
class Plan:
    """Blocks of a region beside blocks of a peer's."""

@final
class ReadyBlocks:
    """Blocks that one step makes ready, region by region."""

    def __new__(cls, parts: Sequence[tuple[bytes, int, Sequence[int]]]) -> ReadyBlocks:
        """Parts are `(handoff, first, block_ids)`."""

@final
class Agent:
    """Block transfers, and the worker role's side of handoffs."""

    def __new__(
        cls,
        listen: str,
        token: _ListenerTokens,
        transport: Transport,
        engine_id: str = "",
        fingerprint: Sequence[tuple[str, str]] = ...,
        silence: float | None = None,
        integrity: str = "auto",
        first_block_timeout: float = 300.0,
    ) -> Agent:
        """`listen` may be `host:first-last`: the first free port.

        The producers of its loads wait for their first block for `first_block_timeout` seconds.
        """

    @property
    def address(self) -> str | None: ...
    @property
    def incarnation(self) -> bytes: ...
    def trace_to(self, trace: Trace) -> None:
        """Traces handoffs from now on."""

    @property
    def num_leased(self) -> int:
        """Number of handoffs whose blocks are leased."""

    @property
    def num_sessions(self) -> tuple[int, int]:
        """`(num_remote_read, num_stream)`: sessions by how this side gets its peer's bytes."""

    def register(self, name: str, data: Any, block_bytes: int, stride: int, is_writable: bool = False) -> Work:
        """Ends with a `Region`."""

    def close_region(self, region: Region, timeout: float | None = None) -> Work:
        """Ends when nothing reads or writes its memory any more."""

    def connect(self, address: str) -> Work:
        """Ends with a `Peer`, once its regions are known."""

    def add_peer(self, metadata: bytes) -> Work:
        """As `connect`, and only to the life of the agent that the metadata is of."""

    def metadata(self) -> bytes: ...
    def peers(self) -> list[Peer]: ...
    def stats(self) -> tuple[int, int, int, int, int]:
        """`(bytes_read, bytes_written, num_reads, num_writes, in_flight)`."""

    @property
    def num_regions(self) -> int: ...
    def prepare(self, peer: Peer, region: Region, local_ids: Any, remote_region: str, remote_ids: Any) -> Plan:
        """Ids are a range, an array of integers of one dimension, or an iterable of integers."""

    def read(self, plan: Plan, notify: bytes | None = None, timeout: float | None = None) -> Work: ...
    def write(self, plan: Plan, notify: bytes | None = None, timeout: float | None = None) -> Work: ...
    def notify(self, peer: Peer, tag: bytes) -> Work: ...
    def notifications(self, timeout: float | None = None) -> list[tuple[Peer, bytes]]:
        """Waits without the GIL; empty when the timeout came first. Ctrl-C interrupts."""

    def notifications_fileno(self) -> int:
        """A descriptor that is readable while there are notifications. It belongs to this object."""

    def mark_ready(
        self, ready: ReadyBlocks, regions: Sequence[Region], event: CudaEvent | ManualEvent | None = None
    ) -> None:
        """Announces the blocks of a step in these regions, each of which is named once a step. Does not wait.

        With an event they are announced once it, and those of earlier calls, are completed. If it fails, the handoffs
        end with the reason.
        """

    def end(self, handoff: bytes, reason: str) -> None: ...
    def load(
        self,
        handoff: bytes,
        producer: str,
        incarnation: bytes,
        parts: Sequence[tuple[Sequence[Region], int, Sequence[int]]],
        is_committed: bool,
        event: CudaEvent | ManualEvent | None = None,
        *,
        rank: int = 0,
        destination_slice: tuple[int, int] | None = None,
        source_slice: tuple[int, int] | None = None,
        is_shared: bool = False,
    ) -> None:
        """Begins a load, without waiting. Each part has regions, the position of the first block, and destination ids.

        `rank` numbers the producer's worker: a handoff has one load from each. `commit` and `cancel` are for all of
        them, and events repeat the number. Slices are `(index, count)`: the part of each block here that the load
        fills, and the part of the producer's that it reads; `None` is all of it. With `is_shared` the load does not
        acknowledge the handoff, because other workers load from the producer's, too.

        The `missing` of `load_failed` counts through the ids of all parts. With an event, no block is written before
        the event is completed.

        If the event fails, so does the load, with the reason.
        """

    def commit(self, handoff: bytes) -> None: ...
    def cancel(self, handoff: bytes, reason: str, is_withdrawn: bool) -> None:
        """Ends a load. `is_withdrawn`: every block is missing, because its producer withdrew it or it is unused."""

    def drain(self) -> list[dict[str, Any]]:
        """Events since the last call: `blocks_verified`, `load_completed`, `load_failed`, `acknowledged`, `log`."""

    def close(self) -> None:
        """Raises `TransferTimeoutError`, once closed, as long as UCX has not ended reads into memory of regions."""

@final
class Control:
    """The control plane: handoffs between schedulers, and questions to others' control ports."""

    def __new__(
        cls,
        listen: str | None,
        token: _ListenerTokens,
        engine_id: str = "",
        fingerprint: Sequence[tuple[str, str]] = ...,
        silence: float | None = None,
        lease: float = 30.0,
        open_timeout: float = 30.0,
        handoff_timeout: float = 300.0,
    ) -> Control: ...
    @property
    def address(self) -> str | None: ...
    def trace_to(self, trace: Trace) -> None:
        """Traces handoffs from now on."""

    def describe_as(self, json: str) -> None: ...
    def allow_checks(self, names: Sequence[str], networks: Sequence[tuple[str, int]]) -> None:
        """Answers checks of producers on these hosts from now on; none: of any. Before, all are refused."""

    def expect(self, handoff: bytes) -> None: ...
    def open(
        self,
        handoff: bytes,
        prompt_hash: bytes,
        num_tokens: int,
        ranks: Sequence[tuple[str, bytes]],
        adapter: str = "",
        stages: Sequence[Sequence[int]] = ...,
    ) -> None:
        """`stages` has the number of layers of each KV cache group in each stage of a pipeline; empty: one stage."""

    def progress(self, handoff: bytes, remaining: float) -> None: ...
    def finish(
        self,
        handoff: bytes,
        output_ids: Sequence[int],
        finish_reason: str,
        num_cached_tokens: int,
        sampling_hash: bytes,
    ) -> None: ...
    def withdraw(self, handoff: bytes, reason: str) -> None: ...
    def watch(self, handoff: bytes, producer: str) -> None: ...
    def unwatch(self, handoff: bytes, is_acknowledged: bool) -> None: ...
    def set_result(self, handoff: bytes, json: str) -> None: ...
    def ask_description(self, address: str, timeout: float) -> Work: ...
    def ask_release(self, address: str, handoff: bytes, timeout: float) -> Work: ...
    def ask_result(self, address: str, handoff: bytes, timeout: float) -> Work: ...
    def ask_subscription(self, address: str, handoff: bytes, lead: float, timeout: float) -> Work: ...
    def report_progress(self, address: str, handoff: bytes, remaining: float, timeout: float) -> Work:
        """Tells the control port of the own engine that a prefill will end after `remaining` seconds."""

    def ask_check(self, address: str, producer: str, timeout: float) -> Work: ...
    def ask_watched(self, address: str, handoff: bytes, timeout: float) -> Work: ...
    def drain(self) -> list[dict[str, Any]]: ...
    def wait(self) -> bool:
        """Blocks, without the GIL and unaware of signals, until there have been events since the last call.

        They may be drained by then. `False` once the control plane is closed.
        """

    def close(self) -> None: ...

@final
class RespTls:
    """The authorities that connections to Valkey or Redis trust, and the certificate of this client: PEM files.

    Without `ca_file` the authorities of the system are trusted. `key_file` is by default `cert_file`.

    Raises:
        ConfigError: A file cannot be read, or `ca_file` has no certificate.
    """

    def __new__(
        cls, *, ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
    ) -> RespTls: ...

@final
class RespConnection:
    """A connection to Valkey or Redis over TCP or TLS, for large values. One call uses it at a time.

    `timeout_s` bounds the connect, each exchange and each part of a value. After `PeerLostError` it is broken. Calls
    release the GIL. With `tls` the server has to have a certificate for `host`.

    Raises:
        ConnectError: The server was not reached.
    """

    def __new__(cls, host: str, port: int, timeout_s: float, tls: RespTls | None = None) -> RespConnection: ...
    @property
    def is_idle(self) -> bool:
        """True if a command may be sent: the server has neither closed the connection nor sent anything unasked."""

    def subscribe(self) -> RespSubscription:
        """Makes a subscription of the connection, which is broken for everything else then."""

    def send(self, commands: Sequence[Sequence[bytes]]) -> None:
        """Sends commands. Their replies must be received before anything else is called."""

    def receive(self, num_replies: int) -> list[Any]:
        """The replies: `bytes`, `int`, `None`, a list of such, or `str` for an error."""

    @staticmethod
    def write_parts(
        connections: Sequence[RespConnection], memory: Any, parts: Sequence[tuple[bytes, int]], ttl_ms: int
    ) -> list[str | int | None]:
        """Sets each key to its number of bytes, which follow each other in `memory` and fill it.

        Returns:
            For each part `None`, or the error with which the server refused.
        """

    @staticmethod
    def read_parts(
        connections: Sequence[RespConnection], memory: Any, parts: Sequence[tuple[bytes, int]]
    ) -> list[str | int | None]:
        """Gets the value of each key into its place in `memory`, as `write_parts`.

        Returns:
            For each part `None`, or its size if that is another one, -1 if it is missing, or the server's error.
        """

    def close(self) -> None:
        """Ends the connection, and calls that use it with `PeerLostError`."""

@final
class RespSubscription:
    """A connection that wakes callers when messages of their channels arrive. Any thread may call.

    It has no thread: one of the callers that wait reads for all. `PeerLostError` ends it, and so does an error reply,
    which its calls and those of its waiters raise as `kvpipe.store.valkey.errors.RefusedError`.
    """

    @property
    def has_received(self) -> bool:
        """True if the server has answered at all, other than by an error."""

    @property
    def has_ended(self) -> bool:
        """True if an error has ended it."""

    def listen(self, channel: bytes) -> RespWaiter:
        """Begins to wait for messages of a channel.

        Raises:
            PeerLostError: The subscription has ended.
            CapacityError: The process may open no more descriptors. The subscription goes on.
        """

    def close(self) -> None:
        """Ends the subscription, and its waiters with `PeerLostError`. To drop the object does not end it."""

@final
class RespWaiter:
    """One caller of a `RespSubscription`."""

    def begin(self) -> bool:
        """Begins an attempt to get what the caller waits for. Each change from now on ends the next `wait`.

        Returns:
            Whether messages arrive. Only then an attempt that fails may wait.

        Raises:
            PeerLostError: The subscription has ended.
        """

    def wait(self, timeout: float | None = None) -> None:
        """Waits until a message arrives, or messages arrive from now on, or the time is over. Releases the GIL.

        Raises:
            PeerLostError: The subscription has ended.
        """

    def close(self) -> None:
        """Ends the waiter. A second call does nothing."""
