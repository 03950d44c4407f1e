"""Tensors on GPUs, with stand-ins for them; tests/gpu has the tests that need one."""

import ctypes
import threading
import time

import numpy as np
import pytest

from kvpipe import (
    Agent,
    ClosedError,
    ConfigError,
    LookupBuffer,
    TransferTimeoutError,
    TransportUnavailableError,
    _cuda,
    _kvpipe,
)
from kvpipe._deferred import DeferredQueue
from kvpipe._tensor import describe
from kvpipe.pipe import _moved

torch = pytest.importorskip("torch")

TIMEOUT_S = 20
SIZES = [3, 20_000]  # inside a message, were they on the host, and larger


class CudaArray:
    """Stand-in for an array on a GPU: speaks `__cuda_array_interface__`, its memory is the host's."""

    def __init__(self, shape=(2, 3), typestr="<f4", **more):
        self.memory = ctypes.create_string_buffer(64)
        data = (ctypes.addressof(self.memory), more.pop("is_read_only", False))
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": data, "version": 3, **more}


class Stream:
    """Stand-in for a `_kvpipe.CudaEvent`: a stream that is done when the test says so."""

    def __init__(self):
        self.done = threading.Event()

    def wait(self):
        assert self.done.wait(TIMEOUT_S)


@pytest.fixture
def driver(monkeypatch):
    """Stand-ins for what asks the CUDA driver: all memory is cuda:1's. The streams that were recorded."""
    streams = {}

    class Event:
        @staticmethod
        def record_pending(device, stream):
            streams[device, stream] = Stream()
            return streams[device, stream]

    monkeypatch.setattr(_cuda._kvpipe, "cuda_device_of", lambda address: 1)
    monkeypatch.setattr(_cuda._kvpipe, "cuda_is_exportable", lambda address: True)
    monkeypatch.setattr(_cuda._kvpipe, "CudaEvent", Event)
    return streams


@pytest.fixture
def slow(monkeypatch):
    """Makes numpy arrays look as if a stream had still to write them; the host's memory stands in for a GPU's."""

    def begin(module):
        stream = Stream()
        real = module.describe

        def described(tensor, **options):
            ready = stream if getattr(tensor, "size", 0) > 1 else None
            return real(tensor, **options)._replace(ready=ready)

        monkeypatch.setattr(module, "describe", described)
        return stream

    return begin


def threads():
    return {thread for thread in threading.enumerate() if thread.name == "kvpipe-deferred"}


# --- recognition ------------------------------------------------------------------------------------------------


def test_a_cuda_array_is_described_in_place_as_numpy_describes_it(driver):
    array = CudaArray(stream=7)
    described = describe(array)
    assert described.meta == describe(np.zeros((2, 3), "<f4")).meta
    assert (described.data.address, len(described.data), described.data.device) == (
        ctypes.addressof(array.memory),
        24,
        1,
    )
    assert described.ready is driver[1, 7]


def test_a_cuda_array_without_a_stream_is_ready(driver):
    assert describe(CudaArray()).ready is None
    assert describe(CudaArray(stream=None)).ready is None
    assert not driver


def test_an_empty_cuda_array_is_described_like_an_empty_one_of_the_host(driver):
    assert describe(CudaArray(shape=(0, 3)))[:2] == describe(np.zeros((0, 3), "<f4"))[:2]


@pytest.mark.parametrize(
    ("strides", "is_contiguous"),
    [(None, True), ((12, 4), True), ((4, 8), False), ((24, 4), False), ((12, 8), False)],
)
def test_a_cuda_array_with_gaps_is_refused(driver, strides, is_contiguous):
    array = CudaArray(strides=strides)
    if is_contiguous:
        assert len(describe(array).data) == 24
        return
    with pytest.raises(ConfigError, match="contiguous"):
        describe(array)


def test_the_stride_of_a_dimension_with_one_element_does_not_count(driver):
    assert len(describe(CudaArray(shape=(1, 3), strides=(999, 4))).data) == 12
    assert len(describe(CudaArray(shape=(1, 1), strides=(9, 9))).data) == 4
    assert len(describe(CudaArray(shape=(), strides=())).data) == 4


def test_a_read_only_cuda_array_is_no_destination(driver):
    array = CudaArray(is_read_only=True)
    assert len(describe(array).data) == 24
    with pytest.raises(ConfigError, match="read-only"):
        describe(array, must_be_in_place=True)


@pytest.mark.parametrize("odd", [{"typestr": "|V4"}, {"typestr": "|O8"}, {"mask": CudaArray()}])
def test_a_cuda_array_without_plain_elements_is_refused(driver, odd):
    with pytest.raises(ConfigError, match="plain elements"):
        describe(CudaArray(**odd))


def test_a_cuda_array_is_kept_alive_by_what_describes_it(driver):
    array = CudaArray()
    data = describe(array).data
    import gc  # noqa: PLC0415
    import weakref  # noqa: PLC0415

    alive = weakref.ref(array)
    del array
    gc.collect()
    assert alive() is not None
    del data
    gc.collect()
    assert alive() is None


def test_without_a_driver_a_cuda_array_is_refused_with_the_remedy(pair):
    try:
        _kvpipe.CudaEvent.record(0, 0)
    except TransportUnavailableError:
        pass
    else:
        pytest.skip("there is a GPU")
    for attempt in (pair[0].send_tensor, lambda tensor: pair[1].recv_tensor(out=tensor)):
        with pytest.raises(TransportUnavailableError, match=r"CudaArray on device cuda cannot.*copy it to the CPU"):
            attempt(CudaArray())
    pair[0].send_tensor(None)
    assert pair[1].recv_tensor(timeout=TIMEOUT_S) is None


def test_where_the_transport_has_no_cuda_the_error_names_the_remedy_and_the_pipe_is_usable(driver, pair):
    sender, receiver = pair
    for _ in range(2):
        with pytest.raises(TransportUnavailableError, match=r"needs a UCX with CUDA.*kvpipe\[ucx-cu12\]"):
            sender.send_tensor(CudaArray())
    sender.send_tensor(np.arange(3))
    assert receiver.recv_tensor(timeout=TIMEOUT_S).tolist() == [0, 1, 2]


def test_where_the_transport_has_no_cuda_a_region_on_a_gpu_is_refused_with_the_remedy(driver, transport):
    with Agent() as agent, pytest.raises(TransportUnavailableError, match=r"needs a UCX with CUDA"):
        agent.register(CudaArray(), "kv", 8)


def test_memory_that_other_processes_cannot_open_is_logged_once_with_the_remedy(driver, monkeypatch, caplog):
    monkeypatch.setattr(_cuda, "_is_logged", False)
    monkeypatch.setattr(_cuda._kvpipe, "cuda_is_exportable", lambda address: False)
    for _ in range(2):
        describe(CudaArray())
    assert [record.getMessage().partition("PYTORCH")[2] for record in caplog.records] == [
        "_CUDA_ALLOC_CONF=expandable_segments:False"
    ]


def test_a_cuda_array_is_not_inserted_into_a_lookup_buffer_and_the_remedy_named(driver):
    buffer, tokens = LookupBuffer(), np.arange(4)
    with pytest.raises(TransportUnavailableError, match="CudaArray on a GPU cannot be inserted; copy it"):
        buffer.insert(tokens, None, CudaArray(), None, None)
    assert buffer.stats().num_inserted == 0


@pytest.mark.parametrize("values", [np.arange(3), torch.arange(3), None])
def test_what_is_received_for_a_device_becomes_a_torch_tensor_there_whatever_it_was(values):
    """With the CPU in place of a GPU."""
    described = describe(values)
    moved = _moved(torch, (*described.meta, bytearray(described.data)), "cpu")
    assert moved is None if values is None else torch.equal(moved, torch.arange(3))


# --- streams ----------------------------------------------------------------------------------------------------


def test_tensors_of_the_host_make_no_thread(pair):
    (sender, receiver), before = pair, threads()
    for size in SIZES:
        work = sender.isend_tensor(np.zeros(size))
        assert receiver.recv_tensor(out=np.ones(size), timeout=TIMEOUT_S).sum() == 0
        work.wait(TIMEOUT_S)
    assert threads() <= before


@pytest.mark.parametrize("size", SIZES)
def test_what_is_sent_after_a_tensor_whose_stream_is_not_done_arrives_after_it(pair, slow, size):
    from kvpipe import pipe  # noqa: PLC0415

    sender, receiver = pair
    stream = slow(pipe)
    tensor = np.zeros(size)
    works = [sender.isend_tensor(item) for item in (tensor, None, np.ones(1))]
    assert not any(work.is_completed() for work in works)
    with pytest.raises(ConfigError, match="wait"):
        works[0].result()
    with pytest.raises(TransferTimeoutError, match="continues"):
        works[1].wait(0.05)
    with pytest.raises(TransferTimeoutError, match="usable"):
        receiver.recv_tensor(timeout=0.05)
    tensor[:] = 7  # the stream's own work
    stream.done.set()
    assert (receiver.recv_tensor(timeout=TIMEOUT_S) == 7).all()
    assert receiver.recv_tensor(timeout=TIMEOUT_S) is None
    assert receiver.recv_tensor(timeout=TIMEOUT_S).tolist() == [1]
    for work in works:
        work.wait(TIMEOUT_S)
        assert work.result() is None


def test_a_send_that_expires_before_its_stream_is_done_is_withdrawn_and_the_pipe_is_usable(pair, slow):
    from kvpipe import pipe  # noqa: PLC0415

    sender, receiver = pair
    stream = slow(pipe)
    with pytest.raises(TransferTimeoutError, match="withdrawn"):
        sender.send_tensor(np.zeros(3), timeout=0.05)
    stream.done.set()
    sender.send_tensor(np.ones(1), timeout=TIMEOUT_S)
    assert receiver.recv_tensor(timeout=TIMEOUT_S).tolist() == [1]


def test_a_receive_writes_into_out_only_when_the_stream_of_out_is_done(pair, slow):
    from kvpipe import pipe  # noqa: PLC0415

    sender, receiver = pair
    sender.send_tensor(np.ones(1))
    sender.send_tensor(np.arange(3.0))
    stream = slow(pipe)
    out = np.zeros(3)
    receiver.recv_tensor(timeout=TIMEOUT_S)
    work = receiver.irecv_tensor(out=out)
    after = receiver.irecv_tensor()
    with pytest.raises(TransferTimeoutError):
        work.wait(0.05)
    assert not out.any()
    stream.done.set()
    assert work.wait(TIMEOUT_S) is out
    assert out.tolist() == [0, 1, 2]
    sender.send_tensor(np.ones(1))
    assert after.wait(TIMEOUT_S).tolist() == [1]


def test_a_close_waits_for_the_streams_of_what_was_sent(pair, slow):
    from kvpipe import pipe  # noqa: PLC0415

    sender, receiver = pair
    stream = slow(pipe)
    sender.isend_tensor(np.arange(3))
    closing = threading.Thread(target=sender.close)
    closing.start()
    stream.done.set()
    assert receiver.recv_tensor(timeout=TIMEOUT_S).tolist() == [0, 1, 2]
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()


def test_a_close_that_expires_before_a_stream_is_done_raises_that_the_tensor_was_not_sent(pair, slow):
    from kvpipe import pipe  # noqa: PLC0415

    stream = slow(pipe)
    work = pair[0].isend_tensor(np.arange(3))
    with pytest.raises(TransferTimeoutError, match="the tensor was not sent"):
        pair[0].close(timeout=0.05)
    with pytest.raises(ClosedError):
        work.wait(TIMEOUT_S)
    stream.done.set()


def test_work_that_has_not_begun_can_be_awaited(pair, slow):
    import asyncio  # noqa: PLC0415

    from kvpipe import pipe  # noqa: PLC0415

    sender, receiver = pair
    stream = slow(pipe)

    async def both():
        sent = sender.isend_tensor(np.arange(20_000))
        asyncio.get_running_loop().call_later(0.05, stream.done.set)
        received, _ = await asyncio.gather(receiver.irecv_tensor(), sent)
        return received

    assert asyncio.run(both())[-1] == 19_999


# --- the queue -----------------------------------------------------------------------------------------------


class Native:
    """Stand-in for a `_kvpipe.Work` that has ended."""

    def __init__(self, result):
        self._result = result

    def is_completed(self):
        return True

    def wait(self, timeout=None):
        return True

    def result(self):
        return self._result


def test_a_follower_begins_at_once_what_nothing_is_before():
    queue, before = DeferredQueue(), threads()
    assert queue.post(None, Native, 3.0).result() == 3.0
    assert threads() <= before


def test_a_queue_begins_in_the_order_of_the_calls_and_passes_on_the_remaining_time():
    queue, stream, begun, before = DeferredQueue(), Stream(), [], threads()

    def begin(name):
        return lambda left: begun.append((name, left)) or Native(name)

    works = [queue.post(stream if at == 0 else None, begin(at), 60.0 if at else None) for at in range(3)]
    assert not queue.is_idle
    stream.done.set()
    assert all(work.wait(TIMEOUT_S) for work in works)
    assert [work.result() for work in works] == [0, 1, 2]
    assert [name for name, _ in begun] == [0, 1, 2]
    assert begun[0][1] is None
    assert 0 < begun[1][1] < 60
    assert queue.drain(TIMEOUT_S)
    assert queue.is_idle
    assert len(threads() - before) == 1
    queue.close()


def test_what_goes_wrong_in_a_stream_comes_out_of_the_work_and_the_next_goes_on():
    class Broken:
        def wait(self):
            raise TransportUnavailableError("cuEventSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS (700)")

    queue, stream = DeferredQueue(), Stream()
    bad, good = (queue.post(ready, lambda _: Native(5)) for ready in (Broken(), stream))
    assert bad.wait(TIMEOUT_S)
    with pytest.raises(TransportUnavailableError, match="ILLEGAL_ADDRESS"):
        bad.result()
    assert bad.is_completed()
    stream.done.set()
    assert good.wait(TIMEOUT_S)
    assert good.result() == 5
    queue.close()


def test_a_closed_follower_ends_its_thread_and_what_has_not_begun():
    queue, stream, before = DeferredQueue(), Stream(), threads()
    works = [queue.post(stream, lambda _: Native(0)) for _ in range(2)]
    queue.close()
    for work in works:
        assert work.wait(TIMEOUT_S)
        with pytest.raises(ClosedError):
            work.result()
    with pytest.raises(ClosedError):
        queue.post(Stream(), lambda _: Native(0))
    stream.done.set()
    deadline = time.monotonic() + TIMEOUT_S
    while threads() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threads() <= before


def test_a_transfer_of_blocks_waits_for_the_stream_and_later_notifications_wait_with_it(agent, other, monkeypatch):
    source, target = np.arange(16, dtype=np.uint8), np.zeros(16, np.uint8)
    other.register(source, "kv", 8)
    own = agent.register(target, "own", 8)
    peer = agent.connect(other.address)
    stream = Stream()
    monkeypatch.setattr(own, "_ready", lambda: stream)
    read = peer.read_blocks(own, [0, 1], "kv", [1, 0], notify=b"read")
    told = peer.notify(b"later")
    with pytest.raises(TransferTimeoutError):
        told.wait(0.05)
    assert not target.any()
    stream.done.set()
    assert read.wait(TIMEOUT_S) == 16
    told.wait(TIMEOUT_S)
    assert target.tolist() == [*range(8, 16), *range(8)]
    assert [tag for _, tag in other.notifications(TIMEOUT_S) + other.notifications(0)] == [b"read", b"later"]
