"""Runs kernels in PTX without a GPU: one thread block after the other, the lanes of a warp in lock step.

It knows the instructions that kvpipe's kernels use, and fails on others. Each access to memory has to be within a range
that it was given, and aligned as a GPU demands.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

NUM_LANES = 32
CONST_BASE = 0x100
SHARED_BASE = 0x400

Values = np.ndarray
_LANES = np.arange(NUM_LANES)
_UNWRITTEN = np.uint64(0xDEAD_BEEF_DEAD_BEEF)
_OPERATIONS = {
    "add": np.add,
    "sub": np.subtract,
    "neg": np.negative,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "shl": np.left_shift,
}
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


class PtxError(AssertionError):
    """The kernel does what a GPU, or this interpreter, refuses."""


class Memory:
    """Ranges of memory, by their addresses."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, np.ndarray]] = []

    def add(self, address: int, data: np.ndarray) -> int:
        """Puts bytes at an address, and shares them with the kernel; returns the address."""
        self._ranges.append((address, data))
        return address

    def find(self, address: int, num_bytes: int) -> np.ndarray:
        """The bytes at an address."""
        if address % num_bytes:
            raise PtxError(f"an access to {num_bytes} bytes at {address:#x} is not aligned")
        for base, data in self._ranges:
            if base <= address and address + num_bytes <= base + len(data):
                return data[address - base : address - base + num_bytes]
        raise PtxError(f"an access to {num_bytes} bytes at {address:#x} is out of bounds")


class Warp:
    """The registers and the places of 32 threads."""

    def __init__(self, first_thread: int, spaces: dict[str, Memory], special: dict[str, int]) -> None:
        self.spaces = spaces
        self._registers = {name: np.full(NUM_LANES, value, np.uint64) for name, value in special.items()}
        self._registers["%tid.x"] = (_LANES + first_thread).astype(np.uint64)
        self.at = np.zeros(NUM_LANES, np.int64)

    def __getitem__(self, name: str) -> Values:
        try:
            return self._registers[name]
        except KeyError:
            raise PtxError(f"{name} is read before it is written") from None

    def set(self, name: str, active: Values, values: Values, bits: int = 64) -> None:
        """Writes a register of the active lanes."""
        if bits < 64:
            values = values & np.uint64((1 << bits) - 1)
        self._registers[name] = np.where(active, values, self._registers.get(name, _UNWRITTEN))


Step = Callable[[Warp, Values], None]
Operand = Callable[[Warp], Values]


class Kernel:
    """The kernel of a PTX file."""

    def __init__(self, path: Path) -> None:
        text = re.sub(r"//[^\n]*", "", path.read_text())
        head, body = re.split(r"\)\s*\{", text, maxsplit=1)
        self._parameters = re.findall(r"\.param \.u\d+ (\w+)", head)
        self._symbols: dict[str, int] = {}
        self._constants, at = Memory(), CONST_BASE
        for name, listed in re.findall(r"\.b64 (\w+)\[\d+\] = \{(.*?)\};", head, re.DOTALL):
            words = np.array([int(value, 16) for value in listed.split(",")], np.uint64)
            self._symbols[name] = self._constants.add(at, words.view(np.uint8))
            at += words.nbytes
        self._shared_bytes = 0
        self._labels: dict[str, int] = {}
        lines = [line.strip() for line in body.rpartition("}")[0].splitlines()]
        self._lines = [line for line in lines if line and not self._is_declared(line)]
        kept: list[str] = []
        for line in self._lines:
            if line.endswith(":"):
                self._labels[line[:-1]] = len(kept)
            else:
                kept.append(line)
        self._lines = kept
        self._steps = [self._step(line.rstrip(";")) for line in kept]

    def _is_declared(self, line: str) -> bool:
        if shared := re.match(r"\.shared \.align \d+ \.b8 (\w+)\[(\d+)\];", line):
            self._symbols[shared[1]] = SHARED_BASE + self._shared_bytes
            self._shared_bytes += int(shared[2])
        return line.startswith(".")

    def run(self, num_blocks: int, num_threads: int, memory: Memory, *arguments: int) -> None:
        """Launches it. The arguments are those of the kernel."""
        parameters = {f"%{name}": value for name, value in zip(self._parameters, arguments, strict=True)}
        for block in range(num_blocks):
            shared = Memory()
            shared.add(SHARED_BASE, np.zeros(self._shared_bytes, np.uint8))
            spaces = {"global": memory, "shared": shared, "const": self._constants}
            special = {"%ctaid.x": block, "%nctaid.x": num_blocks, "%ntid.x": num_threads, **parameters}
            warps = [self._run(Warp(first, spaces, special)) for first in range(0, num_threads, NUM_LANES)]
            # Each up to its next barrier.
            while warps:
                ended = [next(warp, None) is None for warp in warps]
                if any(ended) and not all(ended):
                    raise PtxError("a warp has ended while another one waits at a barrier")
                warps = [] if all(ended) else warps

    def _run(self, warp: Warp) -> Iterator[bool]:
        """Yields at each barrier. Of lanes that have diverged, those that are behind run first."""
        end = len(self._steps)
        while (at := int(warp.at.min())) < end:
            active = warp.at == at
            warp.at[active] += 1
            if self._lines[at].startswith("bar.sync"):
                if not active.all():
                    raise PtxError("a barrier that some lanes do not reach")
                yield True
                continue
            try:
                self._steps[at](warp, active)
            except PtxError as error:
                raise PtxError(f"{self._lines[at]} {error}") from None

    def _step(self, line: str) -> Step:
        predicate = None
        if line.startswith("@"):
            predicate, line = line[1:].split(None, 1)
        name, _, rest = line.partition(" ")
        opcode, *modifiers = name.split(".")
        operands = _OPERANDS.findall(rest)
        if opcode in _OPERATIONS:
            step = self._computed(operands[0], _bits(modifiers), _OPERATIONS[opcode], operands[1:])
        else:
            step = getattr(self, f"_{opcode}")(modifiers, operands)
        if predicate is None:
            return step
        return lambda warp, active: step(warp, active & (warp[predicate] != 0))

    def _operand(self, text: str) -> Operand:
        if text.startswith("%"):
            return lambda warp: warp[text]
        number = self._symbols[text] if text in self._symbols else int(text, 0)
        values = np.full(NUM_LANES, number & (1 << 64) - 1, np.uint64)
        return lambda _: values

    # --- instructions

    def _ret(self, _: list[str], __: list[str]) -> Step:
        return lambda warp, active: self._go(warp, active, len(self._lines))

    def _bra(self, _: list[str], operands: list[str]) -> Step:
        return lambda warp, active: self._go(warp, active, self._labels[operands[0]])

    @staticmethod
    def _go(warp: Warp, active: Values, to: int) -> None:
        warp.at[active] = to

    def _bar(self, _: list[str], __: list[str]) -> Step:
        return lambda *_: None

    def _computed(self, to: str, bits: int, operation: Callable[..., Values], operands: list[str]) -> Step:
        values = [self._operand(text) for text in operands]
        return lambda warp, active: warp.set(to, active, operation(*(value(warp) for value in values)), bits)

    def _shr(self, modifiers: list[str], operands: list[str]) -> Step:
        if modifiers == ["s64"]:
            shifted = lambda value, by: (value.view(np.int64) >> by.view(np.int64)).view(np.uint64)  # noqa: E731
            return self._computed(operands[0], 64, shifted, operands[1:])
        if modifiers[0].startswith("s"):
            raise PtxError(f"the interpreter has no shr.{modifiers[0]}")
        return self._computed(operands[0], _bits(modifiers), np.right_shift, operands[1:])

    def _mul(self, modifiers: list[str], operands: list[str]) -> Step:
        bits = 64 if modifiers[0] == "wide" else _bits(modifiers)
        return self._computed(operands[0], bits, np.multiply, operands[1:])

    def _mad(self, modifiers: list[str], operands: list[str]) -> Step:
        return self._computed(operands[0], _bits(modifiers), lambda a, b, c: a * b + c, operands[1:])

    def _lop3(self, modifiers: list[str], operands: list[str]) -> Step:
        table = int(operands.pop(), 0)

        def looked_up(*inputs: Values) -> Values:
            result = np.zeros(NUM_LANES, np.uint64)
            for index in range(8):
                if table >> index & 1:
                    chosen = [value if index >> 2 - at & 1 else ~value for at, value in enumerate(inputs)]
                    result |= chosen[0] & chosen[1] & chosen[2]
            return result

        operation = {0x96: lambda a, b, c: a ^ b ^ c}.get(table, looked_up)
        return self._computed(operands[0], _bits(modifiers), operation, operands[1:])

    def _cvt(self, modifiers: list[str], operands: list[str]) -> Step:
        if any(modifier[0] != "u" for modifier in modifiers):
            raise PtxError(f"the interpreter has no cvt.{'.'.join(modifiers)}")
        return self._computed(operands[0], _bits(modifiers[:1]), lambda value: value, operands[1:])

    def _setp(self, modifiers: list[str], operands: list[str]) -> Step:
        compared = {"ge": np.greater_equal, "lt": np.less, "eq": np.equal, "ne": np.not_equal}[modifiers[0]]
        return self._computed(operands[0], 64, lambda a, b: compared(a, b).astype(np.uint64), operands[1:])

    def _mov(self, modifiers: list[str], operands: list[str]) -> Step:
        to, source = operands
        if to.startswith("{"):
            low, high = _listed(to)
            value = self._operand(source)

            def unpack(warp: Warp, active: Values) -> None:
                whole = value(warp)
                warp.set(low, active, whole, 32)
                warp.set(high, active, whole >> np.uint64(32))

            return unpack
        if source.startswith("{"):
            low, high = _listed(source)
            return self._computed(to, 64, lambda a, b: a | b << np.uint64(32), [low, high])
        return self._computed(to, _bits(modifiers), lambda value: value, [source])

    def _shfl(self, modifiers: list[str], operands: list[str]) -> Step:
        if modifiers != ["sync", "bfly", "b32"] or operands[3:] != ["31", "0xffffffff"]:
            raise PtxError("the interpreter has no such shfl")
        to, source, distance = operands[0], operands[1], int(operands[2])

        def exchange(warp: Warp, active: Values) -> None:
            if not active.all():
                raise PtxError("a shuffle that some lanes do not reach")
            warp.set(to, active, warp[source][_LANES ^ distance])

        return exchange

    def _ld(self, modifiers: list[str], operands: list[str]) -> Step:
        space, num_bytes, names = modifiers[0], _bits(modifiers) // 8, _listed(operands[0])
        if space == "param":
            return self._computed(operands[0], 64, lambda value: value, [f"%{operands[1].strip('[]')}"])
        address = self._address(operands[1])

        def load(warp: Warp, active: Values) -> None:
            loaded = np.zeros((len(names), NUM_LANES), np.uint64)
            addresses, memory = address(warp), warp.spaces[space]
            for lane in np.flatnonzero(active):
                data = memory.find(int(addresses[lane]), num_bytes * len(names))
                loaded[:, lane] = data.view(f"<u{num_bytes}")
            for name, values in zip(names, loaded, strict=True):
                warp.set(name, active, values)

        return load

    def _st(self, modifiers: list[str], operands: list[str]) -> Step:
        space, num_bytes = modifiers[0], _bits(modifiers) // 8
        address, names = self._address(operands[0]), _listed(operands[1])

        def store(warp: Warp, active: Values) -> None:
            addresses, memory = address(warp), warp.spaces[space]
            for lane in np.flatnonzero(active):
                data = memory.find(int(addresses[lane]), num_bytes * len(names))
                data.view(f"<u{num_bytes}")[:] = [warp[name][lane] for name in names]

        return store

    def _address(self, text: str) -> Operand:
        base, _, offset = text.strip("[]").partition(" + ")
        by = np.uint64(int(offset or "0"))
        return lambda warp: warp[base] + by


def _bits(modifiers: list[str]) -> int:
    return int(modifiers[-1][1:])


def _listed(operand: str) -> list[str]:
    return [name.strip() for name in operand.strip("{}").split(",")]
