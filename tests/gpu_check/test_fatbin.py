"""Slimming: the device code that one GPU loads stays, and nothing else of the file changes."""

import struct

import pytest
from gpu_vllm import fatbin

PTX, ELF = 1, 2
HEADER_BYTES = 64


def entry(kind, architecture, fill, num_bytes=48):
    header = struct.pack("<HHIQ", kind, 0x101, HEADER_BYTES, num_bytes).ljust(28, b"\7")
    return (header + struct.pack("<I", architecture)).ljust(HEADER_BYTES, b"\7") + fill * num_bytes


def container(*entries):
    content = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content


def shared_object(*containers, name=b".nv_fatbin"):
    """An ELF file with device code between two other sections."""
    names = b"\0.text\0" + name + b"\0.shstrtab\0"
    device = b"".join(containers) + bytes(16)
    parts = [b"", b"\xcc" * 64, device, names]
    starts, at = [], 64
    for part in parts:
        starts.append(at)
        at += len(part)
    offsets = [0, 1, 7, 7 + len(name) + 1]
    rows = [
        struct.pack("<IIQQQQIIQQ", offset, 1, 0, 0, start, len(part), 0, 0, 0, 0)
        for offset, start, part in zip(offsets, starts, parts, strict=True)
    ]
    head = bytearray(b"\x7fELF".ljust(64, b"\0"))
    struct.pack_into("<Q", head, 0x28, at)
    struct.pack_into("<HHH", head, 0x3A, 64, len(rows), 3)
    return bytearray(bytes(head) + b"".join(parts) + b"".join(rows))


def slimmed(*containers, architecture=90):
    data = shared_object(*containers)
    return data, fatbin.slim(data, architecture)


def test_other_architectures_become_zeros_and_offsets_and_all_else_stay():
    given = container(entry(ELF, 80, b"a"), entry(ELF, 90, b"b"), entry(ELF, 100, b"c"), entry(PTX, 90, b"d"))
    found, zeroed = slimmed(given)
    zeros = [entry(ELF, 80, b"\0"), entry(ELF, 90, b"b"), entry(ELF, 100, b"\0"), entry(PTX, 90, b"\0")]
    assert found == shared_object(container(*zeros))
    assert zeroed == 3 * 48


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([(ELF, 80), (ELF, 86), (ELF, 89)], []),
        ([(ELF, 80), (PTX, 80)], [(PTX, 80)]),
        ([(ELF, 100), (PTX, 100)], []),
        ([(ELF, 90), (ELF, 90)], [(ELF, 90), (ELF, 90)]),
    ],
)
def test_of_a_container_stays_what_the_gpu_can_run(given, kept):
    found, _ = slimmed(container(*(entry(kind, architecture, b"x") for kind, architecture in given)))
    left = [entry(kind, number, b"x" if (kind, number) in kept else b"\0") for kind, number in given]
    assert found == shared_object(container(*left))


def test_machine_code_of_the_same_generation_runs():
    found, _ = slimmed(container(entry(ELF, 80, b"a"), entry(ELF, 86, b"b"), entry(PTX, 80, b"c")), architecture=89)
    assert found == shared_object(container(entry(ELF, 80, b"\0"), entry(ELF, 86, b"b"), entry(PTX, 80, b"\0")))


def test_each_container_of_a_section_is_slimmed():
    two = [container(entry(ELF, 75, b"a"), entry(ELF, 90, b"b")) for _ in range(2)]
    found, zeroed = slimmed(*two)
    assert zeroed == 2 * 48
    assert found == shared_object(*[container(entry(ELF, 75, b"\0"), entry(ELF, 90, b"b"))] * 2)


def test_a_section_of_another_name_stays():
    data = shared_object(container(entry(ELF, 80, b"a")), name=b".rodata")
    before = bytes(data)
    assert fatbin.slim(data, 90) == 0
    assert data == before


def test_an_entry_that_is_not_known_is_an_error():
    with pytest.raises(ValueError, match="kind 3 with a header of 64 bytes is unknown"):
        slimmed(container(entry(3, 90, b"a")))
