"""Tensors arrive as sent: each test sends to another process, which sends them back."""

import gc

import ml_dtypes
import numpy as np
import pytest

from kvpipe import ConfigError, Pipe, TransportUnavailableError
from tests.conftest import is_tcp

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.ucx,
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
    pytest.mark.filterwarnings("ignore:.*quantized tensor creation functions.*are deprecated"),
]

TIMEOUT_S = 60
TORCH_DTYPES = sorted({str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)})
STRUCTURED = [("a", "i1"), ("b", ">f8", (2, 3)), ("c", [("d", "S3"), ("e", "M8[s]")])]
NUMPY_DTYPES = [
    *"?bBhHiIlLqQefdgFDG",
    *("S5", "U3", "V7", "M8[ns]", "M8[D]", "m8[us]", ">i2", ">u8", ">f4", ">c16", ">U2"),
    np.dtype(STRUCTURED),
    np.dtype(STRUCTURED, align=True),
]
LAYOUTS = {
    "0-d": lambda t: t.reshape(-1)[5],
    "empty": lambda t: t[:0],
    "empty in the middle": lambda t: t[:, :0],
    "one element": lambda t: t[:1, :1, :1],
    "transposed": lambda t: t.T if isinstance(t, np.ndarray) else t.permute(2, 1, 0),
    "strided": lambda t: t[::2, :, 1::2],
    "offset": lambda t: t[1:],
    "more than one piece": lambda t: t.repeat(5000, axis=0) if isinstance(t, np.ndarray) else t.repeat(5000, 1, 1),
}


class Echo:
    def __init__(self, child):
        back = Pipe.listen()
        child.tell(back.address)
        self.sender = Pipe.connect(child.read())
        self.receiver = back

    def __call__(self, tensor, out=None):
        self.sender.isend_tensor(tensor)
        return self.receiver.recv_tensor(out=out, timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def echo(data_path, start_for_module):
    there_and_back = Echo(start_for_module("echo"))
    there_and_back(torch.zeros(1))  # the other process imports torch
    assert (there_and_back.receiver.transport == "tcp") == is_tcp(data_path)
    return there_and_back


def torch_bytes(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same(received, sent):
    assert type(received) is type(sent)
    assert received.dtype == sent.dtype
    assert tuple(received.shape) == tuple(sent.shape)
    if isinstance(sent, np.ndarray):
        assert received.tobytes() == sent.tobytes()
    else:
        assert torch_bytes(received) == torch_bytes(sent)


def random_torch(dtype, num_elements):
    size = torch.empty(1, dtype=dtype).element_size()
    pattern = torch.arange(num_elements * size, dtype=torch.int64).to(torch.uint8)
    return (pattern % 2 if dtype == torch.bool else pattern).view(dtype)


def random_numpy(dtype, num_elements):
    dtype = np.dtype(dtype)
    pattern = np.arange(num_elements * dtype.itemsize) % (2 if dtype.kind == "b" else 120)
    return pattern.astype(np.uint8).view(dtype)


@pytest.mark.parametrize("name", TORCH_DTYPES)
@pytest.mark.parametrize("num_elements", [3, 100_000])
def test_every_torch_dtype_arrives_or_is_refused_with_the_reason(echo, name, num_elements):
    dtype = getattr(torch, name.removeprefix("torch."))
    if torch.empty(1, dtype=dtype).is_quantized:
        with pytest.raises(ConfigError, match="quantized tensor has no plain bytes; use"):
            echo(torch.empty(num_elements, dtype=dtype))
        return
    sent = random_torch(dtype, num_elements)
    assert_same(echo(sent), sent)


@pytest.mark.parametrize("dtype", NUMPY_DTYPES, ids=str)
@pytest.mark.parametrize("num_elements", [3, 30_000])
def test_every_numpy_dtype_arrives(echo, dtype, num_elements):
    sent = random_numpy(dtype, num_elements)
    received = echo(sent)
    assert_same(received, sent)
    assert received.flags.aligned
    assert received.flags.writeable


def test_dtypes_of_ml_dtypes_arrive(echo):
    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4):
        sent = np.arange(5).astype(dtype)
        assert_same(echo(sent), sent)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "bool"])
def test_every_layout_of_torch_arrives(echo, layout, dtype):
    sent = LAYOUTS[layout](random_torch(getattr(torch, dtype), 4 * 6 * 8).reshape(4, 6, 8))
    assert_same(echo(sent), sent)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "M8[s]", STRUCTURED], ids=str)
def test_every_layout_of_numpy_arrives(echo, layout, dtype):
    sent = np.asarray(LAYOUTS[layout](random_numpy(np.dtype(dtype), 4 * 6 * 8).reshape(4, 6, 8)))
    assert_same(echo(sent), sent)


def test_views_that_change_values_arrive_as_their_values(echo):
    complex_ = torch.complex(torch.arange(6.0), torch.arange(6.0) + 1)
    for view in (complex_.conj(), complex_.conj().imag, complex_.real):
        assert torch.equal(echo(view), view.resolve_conj().resolve_neg())
    array = np.arange(24).reshape(4, 6)
    for view in (array[::-1], array[:, ::-2], np.broadcast_to(array[0], (3, 6)), np.asfortranarray(array)):
        assert np.array_equal(echo(view), view)


def test_a_tensor_with_gradient_arrives_without_and_keeps_its_own(echo):
    parameter = torch.nn.Parameter(torch.ones(3))
    received = echo(parameter)
    assert parameter.requires_grad
    assert not received.requires_grad
    assert torch.equal(received, torch.ones(3))


def test_subclasses_and_scalars_of_numpy_arrive_as_arrays(echo):
    scalar = echo(np.float32(2.5))
    assert (type(scalar), scalar.shape, scalar[()]) == (np.ndarray, (), 2.5)
    record = np.rec.array([(1, 2.0)], dtype=[("mask", "i4"), ("b", "f8")])
    assert echo(record).tolist() == [(1, 2.0)]


def test_none_arrives_in_its_place(echo):
    sent = [None, np.arange(3), None, None, torch.arange(50_000), np.zeros((0, 2)), None]
    for tensor in sent:
        echo.sender.isend_tensor(tensor)
    received = [echo.receiver.recv_tensor(timeout=TIMEOUT_S) for _ in sent]
    assert [type(tensor) for tensor in received] == [type(tensor) for tensor in sent]
    assert torch.equal(received[4], sent[4])


def test_sending_does_not_change_the_tensor(echo):
    for sent in (torch.arange(100_000).reshape(100, 1000).T, np.arange(100_000)[::-3]):
        before = sent.clone() if isinstance(sent, torch.Tensor) else sent.copy()
        echo(sent)
        assert (sent == before).all()


def test_received_tensors_own_their_memory(echo):
    kept = [echo(maker(i)) for i in range(8) for maker in (_full_torch, _full_numpy)]
    gc.collect()
    for _ in range(8):
        echo(_full_torch(99))
    for i, tensor in enumerate(kept):
        assert (tensor == i // 2).all()
        tensor[:] = i // 2 + 1
    assert [int(tensor[0]) for tensor in kept] == [i // 2 + 1 for i in range(16)]


def _full_torch(value):
    return torch.full((20_000 if value % 2 else 20,), value)


def _full_numpy(value):
    return np.full(20_000 if value % 2 else 20, value)


@pytest.mark.parametrize("num_elements", [0, 7, 200_000])
def test_out_is_filled_and_returned(echo, num_elements):
    for sent in (torch.arange(num_elements), np.arange(num_elements)):
        out = sent * 0 - 1
        assert echo(sent, out=out) is out
        assert_same(out, sent)


def test_a_scalar_shaped_out_is_filled(echo):
    for sent, out in ((torch.tensor(7.0), torch.tensor(0.0)), (np.array(7.0), np.array(0.0))):
        assert echo(sent, out=out) is out
        assert out == 7


MISMATCHES = {
    "another dtype": (np.zeros(3, np.int32), "numpy '<i4' [3]"),
    "another shape": (np.zeros((3, 1)), "numpy '<f8' [3, 1]"),
    "another size": (np.zeros(4), "numpy '<f8' [4]"),
    "another byte order": (np.zeros(3, ">f8"), "numpy '>f8' [3]"),
    "another family": (torch.zeros(3, dtype=torch.float64), "torch float64 [3]"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_an_out_that_does_not_match_consumes_nothing_and_names_both(echo, case):
    out, name = MISMATCHES[case]
    sent = np.array([1.0, 2.0, 3.0])
    echo.sender.send_tensor(sent)
    with pytest.raises(ConfigError, match="not consumed") as caught:
        echo.receiver.recv_tensor(out=out, timeout=TIMEOUT_S)
    assert name in str(caught.value)
    assert "numpy '<f8' [3]" in str(caught.value)
    assert np.array_equal(echo.receiver.recv_tensor(timeout=TIMEOUT_S), sent)


def test_an_out_for_none_consumes_nothing(echo):
    echo.sender.send_tensor(None)
    with pytest.raises(ConfigError, match="the next tensor is None"):
        echo.receiver.recv_tensor(out=np.zeros(3), timeout=TIMEOUT_S)
    assert echo.receiver.recv_tensor(timeout=TIMEOUT_S) is None


def _read_only():
    array = np.zeros(3)
    array.flags.writeable = False
    return array


BAD_OUTS = {
    "read-only numpy": (_read_only(), "read-only"),
    "strided numpy": (np.zeros(6)[::2], "contiguous"),
    "scalar": (np.float64(1), "contiguous array"),
    "strided torch": (torch.zeros(6)[::2], "contiguous"),
    "conjugate view": (torch.zeros(3, dtype=torch.complex64).conj(), "conjugate"),
    "list": ([1, 2, 3], "list"),
    "str": ("abc", "str"),
}


@pytest.mark.parametrize("case", BAD_OUTS)
def test_an_out_that_cannot_be_written_in_place_is_refused(echo, case):
    out, reason = BAD_OUTS[case]
    with pytest.raises(ConfigError, match=reason):
        echo.receiver.recv_tensor(out=out, timeout=TIMEOUT_S)
    assert echo(None) is None


BAD_TENSORS = {
    "list": (
        [1, 2],
        "list is no tensor: expected a torch tensor, a numpy array, None, or an object with DLPack",
    ),
    "str": ("ab", "str is no tensor"),
    "objects": (np.array([object()]), "Python objects cannot be sent"),
    "field of objects": (np.zeros(1, [("a", "i4"), ("b", "O")]), "Python objects cannot be sent"),
    "masked": (np.ma.array([1, 2], mask=[0, 1]), "mask would be lost"),
    "overlapping fields": (
        np.zeros(1, {"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [2, 0], "itemsize": 8}),
        "overlap",
    ),
    "long dtype": (np.zeros(1, [(f"field{i}", "i4") for i in range(1000)]), "limit 4096"),
    "sparse": (torch.ones(2, 2).to_sparse(), r"use tensor.to_dense\(\)"),
    "many dimensions": (torch.zeros(1).reshape((1,) * 65), "65 dimensions"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_a_tensor_that_cannot_be_sent_is_refused_and_the_pipe_is_usable(echo, case):
    tensor, reason = BAD_TENSORS[case]
    with pytest.raises(ConfigError, match=reason):
        echo.sender.send_tensor(tensor)
    assert echo(None) is None


def test_a_tensor_on_another_device_is_refused_with_the_remedy(echo):
    with pytest.raises(TransportUnavailableError, match=r"device meta.*use tensor.cpu\(\)"):
        echo.sender.send_tensor(torch.zeros(3, device="meta"))
    assert echo(None) is None


def test_only_the_cpu_can_be_received_into(echo):
    with pytest.raises(TransportUnavailableError, match="device='cuda'"):
        echo.receiver.recv_tensor(device="cuda")
    echo.sender.send_tensor(None)
    assert echo.receiver.recv_tensor(device="cpu", timeout=TIMEOUT_S) is None
