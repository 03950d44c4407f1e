"""Tensors to send and to receive into, in one process: no copies, DLPack, buffers, devices, lifetimes.

Every dtype and layout is sent to another process in test_pipe_tensors.py.
"""

import array
import ctypes
import gc
import mmap
import weakref

import numpy as np
import pytest

from kvpipe import Agent, ConfigError, TransportUnavailableError
from kvpipe._tensor import describe, rebuild

torch = pytest.importorskip("torch")

CUDA = 2  # as DLPack numbers devices
SIZES = [3, 20_000]  # inside the message, and fetched


class Foreign:
    """A tensor of a library that kvpipe does not know: all it has is DLPack."""

    def __init__(self, values, device=(1, 0)):
        self.values = values
        self.device = device

    def __dlpack__(self, **options):
        return self.values.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device


class Old(Foreign):
    """Speaks DLPack from before 1.0, which cannot say whether memory may be written."""

    def __dlpack__(self, *, stream=None):
        return self.values.__dlpack__(stream=stream)


def address_of(buffer):
    return np.frombuffer(buffer, np.uint8).ctypes.data


@pytest.fixture(params=SIZES)
def move(pair, request):
    """Sends a tensor through a pipe."""

    def moved(tensor, out=None):
        sender, receiver = pair
        sender.isend_tensor(tensor)
        return receiver.recv_tensor(out=out, timeout=20)

    moved.size = request.param
    return moved


# --- without a copy ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_a_torch_tensor_is_sent_from_where_it_is_and_received_where_it_lands(dtype):
    tensor = torch.zeros(4, 6, dtype=dtype)
    described = describe(tensor)
    assert address_of(described.data) == tensor.data_ptr()
    landed = bytearray(tensor.nbytes)
    assert rebuild(described.meta, landed).data_ptr() == address_of(landed)
    assert address_of(describe(tensor, must_be_in_place=True).data) == tensor.data_ptr()


@pytest.mark.parametrize("values", [np.zeros((4, 6)), np.zeros(3, ">f4"), np.zeros(3, [("a", "i4"), ("b", "f8")])])
def test_a_numpy_array_is_sent_from_where_it_is_and_received_where_it_lands(values):
    described = describe(values)
    assert address_of(described.data) == values.ctypes.data
    landed = bytearray(values.nbytes)
    assert rebuild(described.meta, landed).ctypes.data == address_of(landed)


@pytest.mark.parametrize("wrap", [memoryview, Foreign, Old])
def test_what_speaks_dlpack_or_the_buffer_protocol_is_sent_from_where_it_is(wrap):
    values = np.arange(12.0).reshape(3, 4)
    described = describe(wrap(values))
    assert address_of(described.data) == values.ctypes.data
    assert described.meta == describe(values).meta


# --- DLPack and buffers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Foreign, Old])
def test_a_foreign_tensor_arrives_as_a_numpy_array(move, kind):
    for values in (np.arange(move.size, dtype=np.int32).reshape(1, -1), np.arange(2.0 * move.size)[::2]):
        received = move(kind(values))
        assert type(received) is np.ndarray
        assert received.dtype == values.dtype
        assert np.array_equal(received, values)


def test_a_foreign_tensor_is_filled_as_out(move):
    out = Foreign(np.zeros(move.size))
    assert move(np.arange(1.0 * move.size), out=out) is out
    assert np.array_equal(out.values, np.arange(1.0 * move.size))


def test_a_foreign_tensor_that_does_not_say_that_it_may_be_written_is_no_out(pair):
    read_only = np.zeros(3)
    read_only.flags.writeable = False
    for out in (Old(np.zeros(3)), Foreign(read_only)):
        with pytest.raises(ConfigError, match="read-only"):
            pair[1].recv_tensor(out=out)


def test_a_foreign_tensor_that_numpy_does_not_know_is_refused_with_the_remedy(pair):
    with pytest.raises(ConfigError, match=r"Foreign: numpy does not know.*torch\.from_dlpack"):
        pair[0].send_tensor(Foreign(torch.zeros(3, dtype=torch.bfloat16)))


BUFFERS = {
    "bytes": lambda n: bytes(range(250)) * n,
    "bytearray": lambda n: bytearray(range(250)) * n,
    "memoryview": lambda n: memoryview(bytes(range(250)) * n),
    "strided memoryview": lambda n: memoryview(bytes(range(250)) * n)[::2],
    "memoryview of 2 dimensions": lambda n: memoryview(np.ones((n, 3), np.int16)),
    "memoryview of another byte order": lambda n: memoryview(np.arange(n, dtype=">i4")),
    "memoryview of nothing": lambda _: memoryview(np.zeros((2, 0, 3))),
    "array.array": lambda n: array.array("d", range(n)),
    "ctypes": lambda n: (ctypes.c_int32 * n)(*range(n)),
    "mmap": lambda n: mmap.mmap(-1, 4096 + n),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_buffer_arrives_as_the_numpy_array_of_its_elements(move, kind):
    sent = BUFFERS[kind](move.size)
    received = move(sent)
    expected = np.asarray(memoryview(sent))
    assert (received.dtype, received.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(received, expected)


@pytest.mark.parametrize("kind", [bytearray, lambda n: memoryview(bytearray(n)), lambda n: array.array("B", bytes(n))])
def test_a_writable_buffer_is_filled_as_out(move, kind):
    out = kind(move.size)
    assert move(b"k" * move.size, out=out) is out
    assert bytes(out) == b"k" * move.size


def test_a_buffer_of_other_elements_or_of_another_length_is_no_out_and_consumes_nothing(pair):
    sender, receiver = pair
    sender.send_tensor(array.array("d", [1, 2]))
    for out in (bytearray(16), array.array("d", [0]), array.array("q", [0, 0]), torch.zeros(2, dtype=torch.float64)):
        with pytest.raises(ConfigError, match=r"numpy '<f8' \[2\]; it was not consumed"):
            receiver.recv_tensor(out=out, timeout=20)
    out = array.array("d", [0, 0])
    assert receiver.recv_tensor(out=out, timeout=20).tolist() == [1, 2]


def test_memory_that_cannot_be_written_in_place_is_no_out(pair):
    bad = {"read-only": b"abc", "contiguous": memoryview(bytearray(8))[::2]}
    for reason, out in bad.items():
        with pytest.raises(ConfigError, match=reason):
            pair[1].recv_tensor(out=out)


# --- devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [(2, "cuda:1"), (10, "rocm:1"), (99, "DLPack type 99:1")])
def test_a_foreign_tensor_on_another_device_is_refused_and_the_device_named(pair, kind, name):
    if kind == CUDA and torch.cuda.is_available():
        pytest.skip("torch sees a GPU, which is asked for the tensor")
    for attempt in (pair[0].send_tensor, lambda tensor: pair[1].recv_tensor(out=tensor)):
        with pytest.raises(TransportUnavailableError, match=f"on device {name} cannot.*copy it to the CPU first"):
            attempt(Foreign(np.zeros(3), device=(kind, 1)))


def test_the_cpu_can_be_received_into_and_a_gpu_that_is_not_there_is_refused_with_the_remedy(pair):
    sender, receiver = pair
    if torch.cuda.is_available():
        pytest.skip("torch sees a GPU")
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        with pytest.raises(TransportUnavailableError, match=r"'cuda.*torch sees no CUDA device; receive to the CPU"):
            receiver.recv_tensor(device=device)
    for device in ("disk", "cuda:x", "cuda:"):
        with pytest.raises(ConfigError, match=f"device='{device}': expected None, 'cpu', or a GPU"):
            receiver.irecv_tensor(device=device)
    with pytest.raises(ConfigError, match="into out, wherever that is"):
        receiver.irecv_tensor(out=np.zeros(3), device="cuda")
    for device in (None, "cpu", torch.device("cpu")):
        sender.send_tensor(np.arange(3))
        assert receiver.recv_tensor(device=device, timeout=20).tolist() == [0, 1, 2]


# --- who keeps what alive ---------------------------------------------------------------------------------------


def test_a_work_keeps_the_sent_tensor_alive_until_it_has_left_and_no_longer(pair):
    sender, receiver = pair
    tensor = np.full(100_000, 7)
    alive = weakref.ref(tensor)
    work = sender.isend_tensor(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    assert (receiver.recv_tensor(timeout=20) == 7).all()
    work.wait(20)
    gc.collect()
    assert alive() is None


def test_dropping_the_work_lets_the_tensor_be_sent_all_the_same(pair):
    sender, receiver = pair
    tensor = np.full(100_000, 7)
    alive = weakref.ref(tensor)
    sender.isend_tensor(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    assert (receiver.recv_tensor(timeout=20) == 7).all()


def test_a_work_keeps_out_alive(pair):
    sender, receiver = pair
    out = np.zeros(100_000)
    alive = weakref.ref(out)
    work = receiver.irecv_tensor(out=out)
    del out
    gc.collect()
    assert alive() is not None
    sender.send_tensor(np.ones(100_000))
    assert work.wait(20) is alive()


def test_memory_that_only_speaks_dlpack_is_registered_in_place(transport):
    values = np.zeros((2, 4096), np.uint8)
    with Agent() as owner, Agent() as reader:
        owner.register(Foreign(values), "kv", 4096)
        values[1] = 7
        arrived = np.zeros(4096, np.uint8)
        own = reader.register(arrived, "own", 4096)
        reader.connect(owner.address).read_blocks(own, [0], "kv", [1]).wait(20)
        assert (arrived == 7).all()


def test_memory_on_a_device_that_cannot_be_registered_is_named(transport):
    with Agent() as agent, pytest.raises(TransportUnavailableError, match="cuda:1"):
        agent.register(Foreign(np.zeros(8), device=(2, 1)), "kv", 8)


def test_the_dtype_of_a_received_structured_array_is_its_own():
    described = describe(np.zeros(2, [("a", "i4"), ("b", "f8")]))
    first, second = (rebuild(described.meta, bytes(described.data)) for _ in range(2))
    first.dtype.names = ("x", "y")
    assert second.dtype.names == ("a", "b")
