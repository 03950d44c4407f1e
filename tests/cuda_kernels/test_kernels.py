"""The kernels of rust/ucx/src/cuda, run by an interpreter of their PTX."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from scripts import digest_kernel
from tests.cuda_kernels.ptx import Kernel, Memory, PtxError

CUDA = Path(__file__).parents[2] / "rust/ucx/src/cuda"
LIST = 1 << 20
BYTES = 1 << 40
OF_A_BYTE = [digest_kernel.over_bytes(byte, 1) for byte in range(256)]


@pytest.fixture(scope="module")
def digesting():
    return Kernel(CUDA / "digest_blocks.ptx")


@pytest.fixture(scope="module")
def copying_and_digesting():
    return Kernel(CUDA / "copy_and_digest.ptx")


@pytest.fixture(scope="module")
def copying():
    return Kernel(CUDA / "copy_chunks.ptx")


@pytest.fixture(scope="module")
def data():
    return np.random.default_rng(46).integers(0, 256, 70_000, dtype=np.uint8)


def reference(data: Sequence[int], state: int = 0) -> int:
    """A digest, byte by byte."""
    for byte in data:
        state = state >> 8 ^ OF_A_BYTE[(state ^ int(byte)) & 255]
    return state


def digests(kernel: Kernel, data: np.ndarray, blocks: list[tuple[int, int]], num_blocks=1, num_threads=64) -> list[int]:
    """Of blocks by their offset and length; the kernel may read nothing else."""
    memory, listed = Memory(), np.zeros((len(blocks), 3), np.uint64)
    for index, (at, length) in enumerate(blocks):
        # A space of its own for each, so that nothing beside it is within bounds.
        base = BYTES * (index + 1) + at
        memory.add(base, data[at : at + length])
        listed[index, :2] = base, length
    memory.add(LIST, listed.reshape(-1).view(np.uint8))
    kernel.run(num_blocks, num_threads, memory, LIST, len(blocks))
    return [int(digest) for digest in listed[:, 2]]


@pytest.mark.parametrize("name", digest_kernel.KERNELS)
def test_the_kernels_are_what_their_script_writes(name):
    assert (CUDA / f"{name}.ptx").read_text() == digest_kernel.kernel(name)


def test_a_digest_gives_the_checksum_of_the_catalogue(digesting):
    [digest] = digests(digesting, np.frombuffer(b"123456789", np.uint8), [(0, 9)])
    all_ones = (1 << 64) - 1
    assert digest ^ digest_kernel.over_bytes(all_ones, 9) ^ all_ones == 0xAE8B_1486_0A79_9888


def test_digests_of_blocks_of_any_size_and_alignment_are_those_of_a_byte_by_byte_computation(digesting, data):
    blocks = [
        (at, length) for length in (0, 1, 7, 8, 9, 255, 256, 257, 264, 1023, 1024, 1031, 4096) for at in (0, 3, 8)
    ]
    blocks += [(16, 65_536), (24, 256 * 7 + 48)]
    expected = [reference(data[at : at + length]) for at, length in blocks]
    assert digests(digesting, data, blocks) == expected


@pytest.mark.parametrize(("num_blocks", "num_threads"), [(1, 32), (3, 64), (2, 512)])
def test_a_launch_of_any_size_computes_every_block_once(digesting, data, num_blocks, num_threads):
    blocks = [(64 * index, 512) for index in range(45)]
    expected = [reference(data[at : at + length]) for at, length in blocks]
    assert digests(digesting, data, blocks, num_blocks, num_threads) == expected


def test_a_flipped_bit_and_words_that_changed_places_change_the_digest(digesting, data):
    block, others = data[:768], []
    for bit in range(0, 8 * 768, 61):
        other = block.copy()
        other[bit // 8] ^= 1 << bit % 8
        others.append(other)
    for first, second in ((0, 8), (0, 256), (8, 520), (248, 256), (0, 512)):
        other = block.copy()
        other[first : first + 8], other[second : second + 8] = block[second : second + 8], block[first : first + 8]
        others.append(other)
    all_bytes = np.concatenate([block, *others])
    found = digests(digesting, all_bytes, [(at, 768) for at in range(0, len(all_bytes), 768)])
    assert len(set(found)) == len(found)


def test_a_kernel_with_another_constant_computes_other_digests(tmp_path, data):
    text = digest_kernel.kernel("digest_blocks")
    constant = digest_kernel.over_bytes(1 << 33, digest_kernel.ROUND_BYTES)
    assert text.count(f"0x{constant:016x}") == 1
    broken = tmp_path / "broken.ptx"
    broken.write_text(text.replace(f"0x{constant:016x}", f"0x{constant ^ 1:016x}"))
    assert digests(Kernel(broken), data, [(0, 4096)]) != [reference(data[:4096])]


def test_chunks_of_any_size_and_alignment_are_copied_and_nothing_beside_them(copying, data):
    chunks = [
        (to, at, length) for length in (0, 1, 15, 16, 17, 4096, 4099, 32_768) for to in (0, 5, 16) for at in (0, 3, 16)
    ]
    memory, listed = Memory(), np.zeros((len(chunks), 3), np.uint64)
    copies = []
    for index, (to, at, length) in enumerate(chunks):
        source, target = BYTES * (2 * index + 1) + at, BYTES * (2 * index + 2) + to
        copies.append(np.zeros(length, np.uint8))
        memory.add(source, data[at : at + length])
        memory.add(target, copies[-1])
        listed[index] = target, source, length
    memory.add(LIST, listed.reshape(-1).view(np.uint8))
    copying.run(2, 96, memory, LIST, len(chunks))
    for (_, at, length), copied in zip(chunks, copies, strict=True):
        assert (copied == data[at : at + length]).all()


def test_what_is_copied_and_digested_is_what_was_read_and_nothing_beside_it(copying_and_digesting, data):
    lengths = (0, 1, 8, 255, 257, 264, 1280, 4099)
    chunks = [(to, at, length) for length in lengths for to in (0, 3, 8) for at in (0, 3, 8)]
    chunks += [(8, 16, 16_384), (0, 24, 256 * 7 + 48)]
    memory, listed, copies = Memory(), np.zeros((len(chunks), 4), np.uint64), []
    for index, (to, at, length) in enumerate(chunks):
        source, target = BYTES * (2 * index + 1) + at, BYTES * (2 * index + 2) + to
        copies.append(np.zeros(length, np.uint8))
        memory.add(source, data[at : at + length])
        memory.add(target, copies[-1])
        listed[index, 0], listed[index, 1], listed[index, 3] = source, length, target
    memory.add(LIST, listed.reshape(-1).view(np.uint8))
    copying_and_digesting.run(2, 64, memory, LIST, len(chunks))
    for (_, at, length), copied, digest in zip(chunks, copies, listed[:, 2], strict=True):
        assert (copied == data[at : at + length]).all()
        assert int(digest) == reference(data[at : at + length])


@pytest.mark.parametrize("name", ["copy_chunks", *digest_kernel.KERNELS])
@pytest.mark.parametrize("architecture", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_the_assembler_takes_the_kernels_and_spills_no_register(name, architecture, tmp_path):
    backend = pytest.importorskip("triton.backends.nvidia", reason="the assembler ptxas comes with triton")
    programs = Path(backend.__path__[0]) / "bin"
    program = programs / ("ptxas-blackwell" if architecture == "sm_100" else "ptxas")
    command = [program, "-v", f"-arch={architecture}", CUDA / f"{name}.ptx", "-o", tmp_path / "out"]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in said.stderr


def test_an_access_out_of_bounds_is_seen(copying, data):
    memory, listed = Memory(), np.array([BYTES, 2 * BYTES, 33], np.uint64)
    memory.add(BYTES, np.zeros(33, np.uint8))
    memory.add(2 * BYTES, data[:32])
    memory.add(LIST, listed.view(np.uint8))
    with pytest.raises(PtxError, match=r"ld\.global\.u8 .* out of bounds"):
        copying.run(1, 32, memory, LIST, 1)
