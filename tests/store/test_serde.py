"""Serde: what comes back, what is refused, and what vLLM's own packing is."""

import dataclasses
import functools
import itertools
import random

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpipe.exceptions import ConfigError, CorruptDataError
from kvpipe.store.serde import DTYPES, SERDES, Layout, Serde

LOSSY = [name for name in SERDES if name != "naive"]
NUMPY_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SHAPES = [*itertools.product((32, 128), (32, 64, 128)), (16, 80)]
HEADER_BYTES = 40
# Half a unit of the last place.
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-20}


def layout_of(dtype="bfloat16", block_size=32, head_size=64, packing="rows", **others):
    shape = {"num_layers": 2, "num_blocks": 3, "num_kv_heads": 2} | others
    return Layout(dtype=dtype, block_size=block_size, head_size=head_size, packing=packing, **shape)


def slabs_of(layout, seed=0):
    """KV whose channels differ in size and offset: `[layers, blocks, heads, 2, block_size, head_size]`."""
    rng = np.random.default_rng(seed)
    layers, blocks, heads, tokens, channels = layout.shape
    kv = rng.standard_normal((layers, blocks, heads, 2, tokens, channels), dtype=np.float32)
    kv *= rng.uniform(0.1, 8, channels)
    kv += rng.choice([0, 0, 5], channels)
    return kv.astype(NUMPY_DTYPES[layout.dtype])


def packed(slabs, packing):
    """The bytes of a chunk."""
    if packing == "rows":
        return slabs.tobytes()
    keys, values = np.swapaxes(slabs[:, :, :, :1], -1, -2), slabs[:, :, :, 1:]
    flat = [half.reshape(*half.shape[:4], -1) for half in (keys, values)]
    return np.concatenate(flat, axis=3).tobytes()


def unpacked(chunk, layout):
    layers, blocks, heads, tokens, channels = layout.shape
    halves = np.frombuffer(chunk, NUMPY_DTYPES[layout.dtype]).reshape(layers, blocks, heads, 2, tokens * channels)
    if layout.packing == "rows":
        return halves.reshape(layers, blocks, heads, 2, tokens, channels)
    keys = np.swapaxes(halves[:, :, :, :1].reshape(layers, blocks, heads, 1, channels, tokens), -1, -2)
    return np.concatenate([keys, halves[:, :, :, 1:].reshape(layers, blocks, heads, 1, tokens, channels)], axis=3)


def decoded(serde, stream, layout):
    out = bytearray(layout.num_bytes)
    serde.decode(stream, layout, out)
    return bytes(out)


def group_range(slabs, axis):
    """The range of values within groups of 32 along an axis, for each value."""
    length = slabs.shape[axis]
    parts = [slabs.take(range(start, min(start + 32, length)), axis) for start in range(0, length, 32)]
    return np.concatenate([np.broadcast_to(np.ptp(part, axis, keepdims=True), part.shape) for part in parts], axis)


def bounds(name, slabs):
    """The documented error of each value, without the rounding to the dtype."""
    largest = np.abs(slabs).max(axis=(-1, -2), keepdims=True)
    if name == "int8":
        return np.broadcast_to(largest / 254, slabs.shape)
    if name == "fp8":
        return np.maximum(np.abs(slabs) / 16, largest * 2**-10 / 448)
    keys, values = slabs[:, :, :, :1], slabs[:, :, :, 1:]
    if name == "cachegen":
        # The anchor is one of the channel's values, kept in 8 bits.
        spread = np.ptp(slabs, -2, keepdims=True) + largest / 254
        halves = (spread[:, :, :, :1] / 30, spread[:, :, :, 1:] / 14)
        halves = [np.broadcast_to(half, keys.shape) for half in halves]
    else:
        steps = {"kivi2": 6, "kivi4": 30}[name]
        halves = (group_range(keys, -2) / steps, group_range(values, -1) / steps)
    return np.concatenate(halves, axis=3) * (1 + 2**-7)


@pytest.mark.parametrize("packing", ["rows", "vec", "vec16"])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("name", SERDES)
def test_each_value_comes_back_within_the_documented_error(name, dtype, packing):
    serde = Serde.parse(name)
    for seed, (block_size, head_size) in enumerate(SHAPES):
        layout = layout_of(dtype, block_size, head_size, packing)
        slabs = slabs_of(layout, seed)
        chunk = packed(slabs, packing)
        stream = serde.encode(chunk, layout)
        assert len(stream) <= serde.max_bytes(layout)
        restored = decoded(serde, stream, layout)
        if name == "naive":
            assert restored == chunk
            continue
        before, after = (each.astype(np.float32) for each in (slabs, unpacked(restored, layout)))
        bound = bounds(name, before)
        bound = bound * 1.00001 + (np.abs(before) + bound) * ROUNDING[dtype] + 1e-7
        assert (np.abs(after - before) <= bound).all()
        # Not better than it can be: each codec has stored less than the KV.
        assert np.abs(after - before).max() > 0


@pytest.mark.parametrize(
    ("name", "ratio"), [("naive", 1), ("int8", 1.99), ("fp8", 1.99), ("kivi4", 3.1), ("kivi2", 5.2), ("cachegen", 3.3)]
)
def test_each_serde_is_as_small_as_documented(name, ratio):
    layout = layout_of(block_size=128, head_size=128)
    stream = Serde.parse(name).encode(slabs_of(layout).tobytes(), layout)
    assert layout.num_bytes / len(stream) >= ratio


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.parametrize("name", LOSSY)
def test_a_stream_is_the_same_for_every_packing(name, dtype):
    serde, rows = Serde.parse(name), layout_of(dtype)
    vec = dataclasses.replace(rows, packing="vec")
    slabs = slabs_of(rows)
    stream = serde.encode(packed(slabs, "rows"), rows)
    assert serde.encode(packed(slabs, "vec"), vec) == stream
    assert (unpacked(decoded(serde, stream, rows), rows) == unpacked(decoded(serde, stream, vec), vec)).all()


@pytest.mark.parametrize("packing", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
@pytest.mark.vllm
def test_the_packing_is_that_of_vllms_cpu_attention(dtype, packing):
    import torch  # noqa: PLC0415
    from vllm import _custom_ops as ops  # noqa: PLC0415

    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM is not the CPU build")
    layout = layout_of(dtype, packing=packing, num_layers=1)
    slabs = slabs_of(layout)
    _, blocks, heads, tokens, channels = layout.shape
    # Inputs of a model's attention: [num_tokens, num_heads, head_size].
    floats = torch.from_numpy(slabs[0].astype(np.float32)).to(getattr(torch, dtype))
    keys, values = floats.permute(2, 0, 3, 1, 4).reshape(2, blocks * tokens, heads, channels)
    cache = torch.zeros(blocks, heads, tokens, 2 * channels, dtype=floats.dtype)
    key_cache, value_cache = cache.view(blocks, heads, 2 * tokens, channels).chunk(2, dim=2)
    slots = torch.arange(blocks * tokens)
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, packing)
    chunk = cache.view(torch.uint8).numpy().tobytes()
    assert chunk == packed(slabs, packing)
    serde, rows = Serde.parse("kivi4"), dataclasses.replace(layout, packing="rows")
    assert serde.encode(chunk, layout) == serde.encode(slabs.tobytes(), rows)


@pytest.mark.parametrize("name", LOSSY)
def test_every_changed_missing_or_added_byte_is_corrupt(name):
    serde, layout = Serde.parse(name), layout_of(num_layers=1, num_blocks=1, head_size=32)
    stream = bytes(serde.encode(slabs_of(layout).tobytes(), layout))
    random.seed(name)
    places = [*range(HEADER_BYTES), *random.sample(range(HEADER_BYTES, len(stream)), 200), len(stream) - 1]
    for place in places:
        changed = bytearray(stream)
        changed[place] ^= 1 << random.randrange(8)
        with pytest.raises(CorruptDataError, match="stored KV is corrupt"):
            decoded(serde, changed, layout)
        with pytest.raises(CorruptDataError, match="stored KV is corrupt"):
            decoded(serde, stream[:place], layout)
    with pytest.raises(CorruptDataError, match="stored KV is corrupt"):
        decoded(serde, stream + b"x", layout)


@settings(deadline=None)
@given(name=st.sampled_from(LOSSY), data=st.binary(max_size=4096))
def test_any_bytes_are_corrupt(name, data):
    with pytest.raises(CorruptDataError, match="stored KV is corrupt"):
        decoded(Serde.parse(name), data, layout_of())


@pytest.mark.parametrize("name", SERDES)
def test_a_value_of_another_layout_or_serde_is_corrupt(name):
    serde, layout = Serde.parse(name), layout_of()
    stream = serde.encode(slabs_of(layout).tobytes(), layout)
    others = [layout_of(num_layers=1), layout_of(block_size=64)]
    if name != "naive":
        others += [layout_of("float16"), layout_of(num_layers=3, num_blocks=2), layout_of(block_size=64, head_size=32)]
    for other in others:
        with pytest.raises(CorruptDataError):
            decoded(serde, stream, other)
    for other in SERDES:
        if other != name:
            with pytest.raises(CorruptDataError):
                decoded(Serde.parse(other), stream, layout)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_kv_that_is_not_finite_is_refused_by_lossy_serdes_and_kept_by_naive(dtype, bad):
    layout = layout_of(dtype)
    slabs = slabs_of(layout)
    slabs[1, 2, 1, 1, 31, 63] = bad
    chunk = slabs.tobytes()
    for name in LOSSY:
        with pytest.raises(ConfigError, match=r"KV of layer 1 has a value that is not finite.*naive"):
            Serde.parse(name).encode(chunk, layout)
    naive = Serde.parse("naive")
    assert decoded(naive, naive.encode(chunk, layout), layout) == chunk


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"packing": "amx"}, "packing amx"),
        ({"packing": "neon"}, "packing neon"),
        ({"packing": "mla", "num_kv_heads": 1}, "packing mla"),
        ({"dtype": "float8_e4m3fn"}, "dtype float8_e4m3fn"),
        ({"dtype": "uint8"}, "dtype uint8"),
        ({"head_size": 36}, "head_size"),
    ],
)
def test_what_only_naive_stores_is_refused_by_name(changes, named):
    layout = layout_of(**changes)
    chunk = random.Random(named).randbytes(layout.num_bytes)
    for serde in map(Serde.parse, LOSSY):
        refused = [
            functools.partial(serde.check, layout),
            functools.partial(serde.max_bytes, layout),
            functools.partial(serde.encode, chunk, layout),
            functools.partial(serde.decode, chunk, layout, bytearray(layout.num_bytes)),
        ]
        for call in refused:
            with pytest.raises(ConfigError, match=f"{named}.*use the serde naive"):
                call()
    naive = Serde.parse("naive")
    naive.check(layout)
    assert decoded(naive, naive.encode(chunk, layout), layout) == chunk


def test_a_chunk_of_mla_has_no_values():
    layout = layout_of(packing="mla", num_kv_heads=1)
    assert layout.num_bytes * 2 == dataclasses.replace(layout, packing="rows").num_bytes


@pytest.mark.parametrize("name", SERDES)
def test_another_size_or_read_only_memory_is_refused(name):
    serde, layout = Serde.parse(name), layout_of()
    chunk = slabs_of(layout).tobytes()
    stream = serde.encode(chunk, layout)
    for call in (
        lambda: serde.encode(chunk[:-2], layout),
        lambda: serde.encode(chunk, layout, bytearray(serde.max_bytes(layout) - 1)),
        lambda: serde.encode(chunk, layout, bytes(serde.max_bytes(layout))),
        lambda: serde.decode(stream, layout, bytearray(layout.num_bytes + 1)),
        lambda: serde.decode(stream, layout, bytes(layout.num_bytes)),
    ):
        with pytest.raises(ConfigError):
            call()


@pytest.mark.parametrize("name", SERDES)
def test_a_chunk_is_encoded_into_the_callers_memory(name):
    serde, layout = Serde.parse(name), layout_of()
    chunk = slabs_of(layout).tobytes()
    out = bytearray(serde.max_bytes(layout) + 100)
    stream = serde.encode(chunk, layout, out)
    assert stream.obj is out
    assert stream == serde.encode(chunk, layout)
    assert out[-100:] == bytes(100)


def test_identities_and_losses_are_named():
    serdes = [Serde.parse(name) for name in SERDES]
    assert [serde.name for serde in serdes if serde.is_lossless] == ["naive"]
    assert [serde.identity for serde in serdes] == ["naive", "int8-1", "fp8-1", "kivi2-1", "kivi4-1", "cachegen-1"]


def test_unknown_names_and_impossible_layouts_are_refused_with_the_choices():
    with pytest.raises(ConfigError, match="serde='zip': expected one of naive, int8, fp8, kivi2, kivi4, cachegen"):
        Serde.parse("zip")
    with pytest.raises(ConfigError, match=f"expected one of {', '.join(DTYPES)}"):
        layout_of("int4")
    for number in (0, -1, 2.0):
        with pytest.raises(ConfigError, match="expected whole numbers, 1 or more"):
            layout_of(num_layers=number)
    with pytest.raises(ConfigError, match="more bytes than any memory has"):
        Serde.parse("int8").check(layout_of(num_layers=1 << 50))
