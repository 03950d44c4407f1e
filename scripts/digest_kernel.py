"""Writes the kernels that compute the digests of blocks on a GPU, into rust/ucx/src/cuda.

    python scripts/digest_kernel.py

digest_blocks.ptx reads blocks. copy_and_digest.ptx copies what it reads, too.

A digest is the raw CRC-64/NVME of a block's bytes: from the state 0, and not inverted. So it is linear. Leading zeros
do not change it, and the host makes from it the checksum of the bytes behind others (rust/core/src/checksum.rs).

A warp computes one block in rounds of 256 bytes: lane i reads the word of 8 bytes at 8 i. A lane's state is moved over
256 bytes for each round, nibble by nibble with a table, and the next word is added. At last each lane's state is moved
over the words of the lanes behind it, and the lanes' states are added. Where the length is no multiple of 256, zeros
stand in front.
"""

from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "rust/ucx/src/cuda"
# By the names of the kernels' files: the entry, and whether the kernel copies.
KERNELS = {"digest_blocks": ("kvpipe_digest_blocks", False), "copy_and_digest": ("kvpipe_copy_and_digest", True)}

# The polynomial of CRC-64/NVME, x^63 in the lowest bit: 1 is the highest bit.
POLYNOMIAL = 0x9A6C9329AC4BC9B5
ONE = 1 << 63

WORD_BYTES = 8
NUM_LANES = 32
ROUND_BYTES = NUM_LANES * WORD_BYTES
# Rounds whose words are loaded before the first of them is added.
NUM_AHEAD = 4
# Bytes of an item of the list: where the block begins, its length, its digest, and where its copy begins.
ITEM_BYTES, COPIED_ITEM_BYTES = 24, 32

# A table for each nibble of a state, with 16 entries of 8 bytes, each 16 times: lanes that read different copies read
# different banks of the shared memory.
NUM_NIBBLES = 16
NUM_COPIES = 16
ENTRY_STRIDE = NUM_COPIES * 8
TABLE_BYTES = 16 * ENTRY_STRIDE
ENTRY_MASK = 15 * ENTRY_STRIDE
ENTRY_SHIFT = ENTRY_STRIDE.bit_length() - 1


def times_x(value: int) -> int:
    """The product with x, modulo the polynomial."""
    return value >> 1 ^ (POLYNOMIAL if value & 1 else 0)


def over_bytes(value: int, num_bytes: int) -> int:
    """A state, moved over so many zero bytes."""
    for _ in range(8 * num_bytes):
        value = times_x(value)
    return value


def _moved_bits() -> list[int]:
    """Of each bit of a state, lowest first, what it is after a round."""
    return [over_bytes(1 << bit, ROUND_BYTES) for bit in range(64)]


def _moves_behind_lanes() -> list[int]:
    """For each lane, the factor by which its state is moved over its own word and those of the lanes behind it."""
    return [over_bytes(ONE, WORD_BYTES * (NUM_LANES - lane)) for lane in range(NUM_LANES)]


def _array(name: str, values: list[int]) -> str:
    rows = [", ".join(f"0x{value:016x}" for value in values[at : at + 4]) for at in range(0, len(values), 4)]
    return f".const .align 8 .b64 {name}[{len(values)}] = {{\n    " + ",\n    ".join(rows) + "\n};"


def _fill_tables() -> Iterator[str]:
    """Each thread computes entries, and writes all copies of each."""
    yield "mov.u32      %entry, %tid.x;"
    yield "next_entry:"
    yield f"setp.ge.u32  %p, %entry, {16 * NUM_NIBBLES};"
    yield "@%p bra      filled;"
    yield "shr.u32      %a, %entry, 4;"
    yield "mul.wide.u32 %at, %a, 32;"
    yield "mov.u64      %t, moved_bits;"
    yield "add.u64      %at, %at, %t;"
    yield "mov.u64      %sum, 0;"
    for bit in range(4):
        yield f"ld.const.u64 %t, [%at + {8 * bit}];"
        yield f"and.b32      %a, %entry, {1 << bit};"
        yield "setp.ne.u32  %p, %a, 0;"
        yield "@%p xor.b64  %sum, %sum, %t;"
    yield f"mul.lo.u32   %a, %entry, {ENTRY_STRIDE};"
    yield "add.u32      %a, %a, %tables;"
    for copy in range(NUM_COPIES):
        yield f"st.shared.u64 [%a + {8 * copy}], %sum;"
    yield "mov.u32      %a, %ntid.x;"
    yield "add.u32      %entry, %entry, %a;"
    yield "bra          next_entry;"
    yield "filled:"
    yield "bar.sync     0;"


def _move_round() -> Iterator[str]:
    """Moves %low and %high, the halves of a state, over a round."""
    for nibble in range(NUM_NIBBLES):
        half = "%low" if nibble < NUM_NIBBLES // 2 else "%high"
        shift = ENTRY_SHIFT - 4 * (nibble % 8)
        yield f"sh{'l' if shift > 0 else 'r'}.b32      %a, {half}, {abs(shift)};"
        yield f"and.b32      %a, %a, {ENTRY_MASK};"
        yield "add.u32      %a, %a, %copy;"
        yield f"ld.shared.v2.u32 {{%x{nibble}, %y{nibble}}}, [%a + {nibble * TABLE_BYTES}];"
    for half, part in (("%low", "x"), ("%high", "y")):
        yield f"mov.u32      {half}, %{part}0;"
        for nibble in range(1, NUM_NIBBLES - 1, 2):
            yield f"lop3.b32     {half}, {half}, %{part}{nibble}, %{part}{nibble + 1}, 0x96;"
        yield f"xor.b32      {half}, {half}, %{part}{NUM_NIBBLES - 1};"


def _add_word(word: str = "%word") -> Iterator[str]:
    yield f"mov.b64      {{%a, %b}}, {word};"
    yield "xor.b32      %low, %low, %a;"
    yield "xor.b32      %high, %high, %b;"


def _each_round(label: str, load: Iterator[str]) -> Iterator[str]:
    """Adds the rest of the rounds, one at a time."""
    yield f"{label}:"
    yield "setp.eq.u32  %p, %rounds, 0;"
    yield "@%p bra      reduce;"
    yield from _move_round()
    yield from load
    yield from _add_word()
    yield f"add.u64      %at, %at, {ROUND_BYTES};"
    yield "sub.u32      %rounds, %rounds, 1;"
    yield f"bra          {label};"


def _copied_to() -> Iterator[str]:
    """The place of the copy of what is at %at."""
    yield "add.u64      %to_at, %at, %distance;"


def _load_bytes(*, copies: bool) -> Iterator[str]:
    """A word at any address, of which the bytes before the block are zeros."""
    if copies:
        yield from _copied_to()
    yield "mov.u64      %word, 0;"
    for byte in range(WORD_BYTES):
        yield f"add.u64      %t, %at, {byte};"
        yield "setp.ge.u64  %p, %t, %from;"
        yield "mov.u64      %t, 0;"
        yield f"@%p ld.global.u8 %t, [%at + {byte}];"
        if copies:
            yield f"@%p st.global.u8 [%to_at + {byte}], %t;"
        yield f"shl.b64      %t, %t, {8 * byte};"
        yield "or.b64       %word, %word, %t;"


def _load_word(*, copies: bool) -> Iterator[str]:
    yield "ld.global.u64 %word, [%at];"
    if copies:
        yield from _copied_to()
        yield "st.global.u64 [%to_at], %word;"


def _many_rounds(*, copies: bool) -> Iterator[str]:
    """Adds rounds of aligned words, while there are as many as are loaded ahead."""
    yield "many_rounds:"
    yield f"setp.lt.u32  %p, %rounds, {NUM_AHEAD};"
    yield "@%p bra      aligned_round;"
    for ahead in range(NUM_AHEAD):
        yield f"ld.global.u64 %word{ahead}, [%at + {ahead * ROUND_BYTES}];"
    if copies:
        yield from _copied_to()
        for ahead in range(NUM_AHEAD):
            yield f"st.global.u64 [%to_at + {ahead * ROUND_BYTES}], %word{ahead};"
    for ahead in range(NUM_AHEAD):
        yield from _move_round()
        yield from _add_word(f"%word{ahead}")
    yield f"add.u64      %at, %at, {NUM_AHEAD * ROUND_BYTES};"
    yield f"sub.u32      %rounds, %rounds, {NUM_AHEAD};"
    yield "bra          many_rounds;"


def _next_block(*, copies: bool) -> Iterator[str]:
    yield "next_block:"
    yield "setp.ge.u32  %p, %index, %num;"
    yield "@%p bra      done;"
    yield f"mul.wide.u32 %place, %index, {COPIED_ITEM_BYTES if copies else ITEM_BYTES};"
    yield "add.u64      %place, %blocks, %place;"
    yield "add.u32      %index, %index, %num_warps;"
    yield "ld.global.u64 %from, [%place];"
    yield "ld.global.u64 %len, [%place + 8];"
    if copies:
        yield "ld.global.u64 %to_at, [%place + 24];"
        yield "sub.u64      %distance, %to_at, %from;"
    yield "mov.u32      %low, 0;"
    yield "mov.u32      %high, 0;"
    yield f"add.u64      %at, %len, {ROUND_BYTES - 1};"
    yield f"shr.u64      %at, %at, {ROUND_BYTES.bit_length() - 1};"
    yield "cvt.u32.u64  %rounds, %at;"
    yield "setp.eq.u32  %p, %rounds, 0;"
    yield "@%p bra      reduce;"
    # The lane's first word ends where the whole rounds behind it begin.
    yield f"shl.b64      %at, %at, {ROUND_BYTES.bit_length() - 1};"
    yield "sub.u64      %at, %len, %at;"
    yield "add.u64      %at, %at, %from;"
    yield f"mul.wide.u32 %t, %lane, {WORD_BYTES};"
    yield "add.u64      %at, %at, %t;"
    yield "or.b64       %t, %from, %len;"
    if copies:
        yield "or.b64       %t, %t, %to_at;"
    yield f"and.b64      %t, %t, {WORD_BYTES - 1};"
    yield "setp.ne.u64  %p, %t, 0;"
    yield "@%p bra      any_round;"
    yield "setp.ge.u64  %p, %at, %from;"
    yield "mov.u64      %word, 0;"
    yield "@%p ld.global.u64 %word, [%at];"
    if copies:
        yield from _copied_to()
        yield "@%p st.global.u64 [%to_at], %word;"
    yield from _add_word()
    yield f"add.u64      %at, %at, {ROUND_BYTES};"
    yield "sub.u32      %rounds, %rounds, 1;"


def _reduce() -> Iterator[str]:
    """Moves the state over the words behind it, and adds the lanes' states."""
    yield "reduce:"
    yield "mov.b64      %word, {%low, %high};"
    yield "mov.u64      %t, moves_behind_lanes;"
    yield "mul.wide.u32 %at, %lane, 8;"
    yield "add.u64      %t, %t, %at;"
    yield "ld.const.u64 %factor, [%t];"
    yield "mov.u64      %sum, 0;"
    yield "mov.u32      %a, 64;"
    # The factor times x to the power of each coefficient of the state.
    yield "next_bit:"
    yield "shr.s64      %t, %word, 63;"
    yield "and.b64      %t, %t, %factor;"
    yield "xor.b64      %sum, %sum, %t;"
    yield "shl.b64      %word, %word, 1;"
    yield "and.b64      %t, %factor, 1;"
    yield "neg.s64      %t, %t;"
    yield f"and.b64      %t, %t, 0x{POLYNOMIAL:016x};"
    yield "shr.u64      %factor, %factor, 1;"
    yield "xor.b64      %factor, %factor, %t;"
    yield "sub.u32      %a, %a, 1;"
    yield "setp.ne.u32  %p, %a, 0;"
    yield "@%p bra      next_bit;"
    yield "mov.b64      {%low, %high}, %sum;"
    for distance in (16, 8, 4, 2, 1):
        for half in ("%low", "%high"):
            yield f"shfl.sync.bfly.b32 %a, {half}, {distance}, 31, 0xffffffff;"
            yield f"xor.b32      {half}, {half}, %a;"
    yield "mov.b64      %sum, {%low, %high};"
    yield "setp.eq.u32  %p, %lane, 0;"
    yield "@%p st.global.u64 [%place + 16], %sum;"
    yield "bra          next_block;"
    yield "done:"
    yield "ret;"


def _begin() -> Iterator[str]:
    yield ".reg .pred %p;"
    yield ".reg .b32  %num, %index, %num_warps, %lane, %rounds, %entry;"
    yield ".reg .b32  %tables, %copy, %a, %b, %low, %high;"
    yield f".reg .b32  %x<{NUM_NIBBLES}>, %y<{NUM_NIBBLES}>;"
    yield f".reg .b64  %word<{NUM_AHEAD}>;"
    yield ".reg .b64  %blocks, %place, %from, %len, %at, %t, %word, %sum, %factor, %to_at, %distance;"
    yield f".shared .align 8 .b8 tables[{NUM_NIBBLES * TABLE_BYTES}];"
    yield "ld.param.u64 %blocks, [blocks];"
    yield "ld.param.u32 %num, [num_blocks];"
    yield "mov.u32      %tables, tables;"
    yield from _fill_tables()
    yield "mov.u32      %a, %tid.x;"
    yield f"and.b32      %lane, %a, {NUM_LANES - 1};"
    yield f"and.b32      %copy, %a, {NUM_COPIES - 1};"
    yield "shl.b32      %copy, %copy, 3;"
    yield "add.u32      %copy, %copy, %tables;"
    yield "shr.u32      %index, %a, 5;"
    yield "mov.u32      %a, %ntid.x;"
    yield "shr.u32      %a, %a, 5;"
    yield "mov.u32      %b, %ctaid.x;"
    # Few blocks go to as many multiprocessors as there are.
    yield "mov.u32      %num_warps, %nctaid.x;"
    yield "mad.lo.u32   %index, %index, %num_warps, %b;"
    yield "mul.lo.u32   %num_warps, %a, %num_warps;"


def kernel(name: str) -> str:
    """The PTX of a kernel's file."""
    entry, copies = KERNELS[name]
    parts = (
        _begin(),
        _next_block(copies=copies),
        _many_rounds(copies=copies),
        _each_round("aligned_round", _load_word(copies=copies)),
        _each_round("any_round", _load_bytes(copies=copies)),
        _reduce(),
    )
    lines = [line for part in parts for line in part]
    body = "\n".join(line if line.endswith(":") else f"    {line}" for line in lines)
    moved, behind = _array("moved_bits", _moved_bits()), _array("moves_behind_lanes", _moves_behind_lanes())
    item = "u64 from; u64 num_bytes; u64 digest" + ("; u64 to" if copies else "")
    return f"""\
// Digests of blocks, one warp each{", which are copied" if copies else ""}. \
Written by scripts/digest_kernel.py, which says how it works.
//
// blocks: num_blocks times {{ {item} }}, in memory that the GPU can read and write.
.version 6.3
.target sm_75
.address_size 64

{moved}

{behind}

.visible .entry {entry}(.param .u64 blocks, .param .u32 num_blocks)
{{
{body}
}}
"""


if __name__ == "__main__":
    for name in KERNELS:
        (FOLDER / f"{name}.ptx").write_text(kernel(name))
