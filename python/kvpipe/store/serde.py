"""Serde: how the KV of a chunk becomes the bytes of a stored value, and back.

A chunk is `[num_layers, num_blocks, num_kv_heads, 2, block_size, head_size]`, contiguous in host memory. Each head of a
block has its keys, then its values. The lossy serdes work on these halves, the slabs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvpipe import _kvpipe
from kvpipe.exceptions import ConfigError, CorruptDataError

if TYPE_CHECKING:
    from typing_extensions import Buffer

DTYPES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1}
SERDES = ("naive", "int8", "fp8", "kivi2", "kivi4", "cachegen")
# Element types that the lossy serdes accept.
_FLOATS = ("bfloat16", "float16", "float32")
_PACKINGS = ("rows", "vec", "vec16")
# Of the lossy serdes' streams and quantisation: one that changes either has another number.
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Layout of a chunk in memory.

    Attributes:
        dtype: A key of `DTYPES`.
        num_layers: Layers of the model that the chunk has.
        num_blocks: Blocks of each layer.
        num_kv_heads: Heads of keys and values; 1 for the packing `mla`.
        block_size: Tokens of a block.
        head_size: Channels of a head.
        packing: `rows`: keys and values are token-major, `[block_size, head_size]`. `vec`, `vec16`: those of vLLM's CPU
            attention, keys `[head_size, block_size]`, values token-major. `mla`: one `[block_size, head_size]` without
            values. Others, such as `amx`, are names of what only `naive` stores.
    """

    dtype: str
    num_layers: int
    num_blocks: int
    num_kv_heads: int
    block_size: int
    head_size: int
    packing: str = "rows"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            message = f"dtype={self.dtype!r}: expected one of {', '.join(DTYPES)}"
            raise ConfigError(message)
        if not all(isinstance(number, int) and number > 0 for number in self.shape):
            message = f"layout with the shape {self.shape}: expected whole numbers, 1 or more"
            raise ConfigError(message)

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """`(num_layers, num_blocks, num_kv_heads, block_size, head_size)`."""
        return self.num_layers, self.num_blocks, self.num_kv_heads, self.block_size, self.head_size

    @property
    def num_bytes(self) -> int:
        """Size of a chunk."""
        return math.prod(self.shape) * DTYPES[self.dtype] * (1 if self.packing == "mla" else 2)


@dataclass(frozen=True)
class Serde:
    """One way to store KV. Any thread may call; calls release the GIL while they work.

    The lossy serdes restore each value with an error of at most

    - `int8`: 1/254 of the largest magnitude in its slab;
    - `fp8`: 1/16 of the value, or 2^-10 / 448 of the largest magnitude in its slab if that is more;
    - `kivi2`, `kivi4`: 1/6 and 1/30 of the range of its group: 32 tokens of a channel for keys, 32 channels of a token
      for values;
    - `cachegen`: 1/30 for keys and 1/14 for values of the largest difference, in its channel and slab, to the anchor
      token of 16.

    For the last two, the bound is up to 1/128 larger. Rounding to the dtype is added, and values below 1e-30 of a slab
    may become 0. Streams have a header and a checksum, and do not depend on the packing: a chunk that was encoded from
    `vec` can be decoded to `rows`.

    Attributes:
        name: One of `SERDES`.
    """

    name: str

    @classmethod
    def parse(cls, name: str) -> Serde:
        """Returns the serde of this name.

        Raises:
            ConfigError: There is none; the message has the choices.
        """
        if name not in SERDES:
            message = f"serde={name!r}: expected one of {', '.join(SERDES)}"
            raise ConfigError(message)
        return cls(name)

    @property
    def is_lossless(self) -> bool:
        """True if the KV comes back as it was."""
        return self.name == "naive"

    @property
    def identity(self) -> str:
        """A part of the store's keys: values of serdes or versions that differ never have the same key."""
        return self.name if self.is_lossless else f"{self.name}-{_VERSION}"

    def check(self, layout: Layout) -> None:
        """Checks, before any KV is there, that chunks of this layout can be stored.

        Raises:
            ConfigError: This serde cannot store them; the message names dtype or packing, and the remedy.
        """
        if self.is_lossless:
            return
        remedy = "use the serde naive"
        if layout.dtype not in _FLOATS:
            message = f"serde {self.name} cannot store the dtype {layout.dtype}, only {', '.join(_FLOATS)}: {remedy}"
            raise ConfigError(message)
        if layout.packing not in _PACKINGS:
            known = ", ".join(_PACKINGS)
            message = f"serde {self.name} cannot undo the packing {layout.packing}, only {known}: {remedy}"
            raise ConfigError(message)
        _kvpipe.serde_max_bytes(self.name, _fields(layout))

    def max_bytes(self, layout: Layout) -> int:
        """Returns a size that no encoded chunk exceeds. All but those of `cachegen` have exactly this size.

        Raises:
            ConfigError: As `check`.
        """
        self.check(layout)
        return layout.num_bytes if self.is_lossless else _kvpipe.serde_max_bytes(self.name, _fields(layout))

    def encode(self, data: Buffer, layout: Layout, out: Buffer | None = None) -> memoryview:
        """Encodes a chunk.

        Args:
            data: The chunk, contiguous in host memory. What others write to it meanwhile is encoded or not.
            layout: Its layout.
            out: Destination: writable, contiguous, `max_bytes` or more. By default new memory, and for `naive` none at
                all: the result is `data`, which must not change while the result is in use.

        Returns:
            The encoded bytes: the first ones of `out`.

        Raises:
            ConfigError: As `check`; or a size is wrong; or the KV has a NaN, an infinity or a magnitude over 2^126, and
                this serde is lossy. Nothing is to be stored then.
        """
        view = memoryview(data).cast("B")
        largest = self.max_bytes(layout)
        if not self.is_lossless:
            out = bytearray(largest) if out is None else out
            num_bytes = _kvpipe.serde_encode(self.name, _fields(layout), view, out)
            return memoryview(out).cast("B")[:num_bytes]
        if view.nbytes != layout.num_bytes:
            message = f"the chunk has {view.nbytes} bytes: its layout has {layout.num_bytes}"
            raise ConfigError(message)
        if out is None:
            return view
        target = memoryview(out).cast("B")[: view.nbytes]
        _kvpipe.serde_copy(view, target)
        return target

    def decode(self, data: Buffer, layout: Layout, out: Buffer) -> None:
        """Decodes a chunk.

        Args:
            data: The bytes that `encode` of the same serde returned, and no more.
            layout: The chunk's layout, of which the packing may be another one, except for `naive`.
            out: Destination: writable, contiguous, of the layout's size. An error leaves its content undefined.

        Raises:
            ConfigError: As `check`; or `out` has another size or is read-only.
            CorruptDataError: The bytes are not those of this serde and layout, or were changed. `naive` has neither
                header nor checksum, and sees only another size: stores verify their values.
        """
        self.check(layout)
        if not self.is_lossless:
            _kvpipe.serde_decode(self.name, _fields(layout), data, out)
            return
        view = memoryview(data).cast("B")
        if view.nbytes != layout.num_bytes:
            message = f"stored KV is corrupt: {view.nbytes} bytes, where the layout has {layout.num_bytes}"
            raise CorruptDataError(message)
        _kvpipe.serde_copy(view, out)


def _fields(layout: Layout) -> tuple[str, str, tuple[int, ...]]:
    """The layout as the native codecs take it."""
    return layout.dtype, layout.packing, layout.shape
