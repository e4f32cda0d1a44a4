"""What ptxas made of a kernel, read from its machine code: how often each unit works, and how many bytes it waits for.

The cubin is an ELF file; its section ``.text.<kernel>`` holds 16-byte instructions, and ``.nv_debug_line_sass`` (DWARF
line numbers, written under ``-lineinfo``) says which line of the PTX each came from. Machine instructions are thereby
counted as often as the executor ran their PTX line.

Instruction words, compute capability 8.0 to 10.0 (no document of the vendor's says it; compared with ``nvdisasm``, of
the wheel nvidia-cuda-nvdisasm, over all kernels here; Jia et al. 2018, arXiv:1804.06826, describe the same fields for
Volta): bits 0 … 8 opcode; 12 … 15 predicate; 73 … 75 width of a memory access (cp.async since 10.0: 74 … 76);
110 … 112 scoreboard that a load sets; 116 … 121 scoreboards that are waited for before issue.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median_low

from numba_engine.backends.cuda.compiler import CompiledKernel
from numba_engine.backends.cuda.ptxas import assemble

_WORD_BYTES = 16
_NO_SCOREBOARD = 7
_ALWAYS = 7

_LDG, _LDGSTS, _LDGDEPBAR, _DEPBAR, _NOP = 0x181, 0x1AE, 0x1AF, 0x11A, 0x118
_BRA, _EXIT, _RET = 0x147, 0x14D, 0x150
_ACCESS_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 8, 6: 16}

FLOAT, HALF, INTEGER, MULTIPLY, SPECIAL, MEMORY, TENSOR, OTHER = (
    "float32",
    "float16",
    "integer",
    "integer multiply",
    "conversion and special",
    "memory",
    "tensor",
    "other",
)
PIPES = (FLOAT, HALF, INTEGER, MULTIPLY, SPECIAL, MEMORY, TENSOR, OTHER)
"""Units of a multiprocessor, as far as their rates differ (CUDA C++ Programming Guide, arithmetic instructions)."""

_PIPE_OF = {
    opcode: pipe
    for pipe, opcodes in {
        FLOAT: (0x020, 0x021, 0x023),  # FMUL FADD FFMA
        HALF: (0x030, 0x031, 0x032, 0x035),  # HADD2 HFMA2 HMUL2 HFMA2.MMA
        INTEGER: (
            *(0x002, 0x003, 0x004, 0x005, 0x007, 0x008, 0x009, 0x00B, 0x00C, 0x010, 0x011, 0x012, 0x016, 0x017),
            *(0x019, 0x01C, 0x036, 0x03E, 0x045, 0x046, 0x048, 0x076),
        ),  # MOV P2R R2P CS2R SEL FSEL FMNMX FSETP ISETP IADD3 LEA LOP3 PRMT IMNMX SHF PLOP3 VIADD F2FP I2FP …
        MULTIPLY: (0x024, 0x025, 0x026, 0x027),  # IMAD, IMAD.WIDE, IDP (dp4a), IMAD.HI
        SPECIAL: (0x100, 0x101, 0x102, 0x104, 0x105, 0x106, 0x108, 0x109, 0x110, 0x111, 0x112),  # FLO BREV MUFU I2F …
        MEMORY: (
            *(0x180, 0x181, 0x182, 0x183, 0x184, 0x185, 0x186, 0x187, 0x188, 0x189, 0x18C, 0x18D, 0x18E, 0x18F),
            *(0x1A6, 0x1A8, 0x1AC, 0x1AE, 0x03B, 0x192, 0x1BA, 0x1BC),
        ),  # LDG LDC LDS STG STS SHFL ATOMS RED CCTL ATOMG LDGSTS LDSM MEMBAR UBLKCP …
        TENSOR: (0x037, 0x03C),  # IMMA HMMA
    }.items()
    for opcode in opcodes
}


_TELLING = frozenset({MEMORY, TENSOR, SPECIAL})


@dataclass(frozen=True, slots=True)
class MachineInstruction:
    """One instruction word and where it came from."""

    word: int
    line: int
    """Of the PTX; 0 where nothing says."""
    target: int | None
    """Index of the instruction that a branch goes to."""
    load_bytes: int
    """Of a lane, from global memory; 0 for what is no load."""
    copies: int
    """Of its part of the PTX, where ptxas unrolled a loop or doubled a block: each ran a share of the times."""

    @property
    def opcode(self) -> int:
        return self.word & 0x1FF

    @property
    def pipe(self) -> str:
        return _PIPE_OF.get(self.opcode, OTHER)

    @property
    def is_conditional(self) -> bool:
        return self.word >> 12 & 0xF != _ALWAYS

    @property
    def sets(self) -> int | None:
        """The scoreboard that says its result is there."""
        scoreboard = self.word >> 110 & 7
        return None if scoreboard == _NO_SCOREBOARD else scoreboard

    @property
    def waits(self) -> int:
        """A bit a scoreboard."""
        return self.word >> 116 & 0x3F


@dataclass(frozen=True, slots=True)
class Executed:
    """Machine instructions that the warps of some blocks executed."""

    instructions: float
    by_pipe: Mapping[str, float]
    bytes_in_flight: float
    """That a warp has asked global memory for and not got, at most, in the mean over the bytes it loads."""


@cache
def machine_code(compiled: CompiledKernel) -> tuple[MachineInstruction, ...]:
    """Raises BackendUnavailableError without ptxas."""
    cubin = assemble(compiled, line_info=True).cubin
    sections = _sections(cubin)
    text = sections[f".text.{compiled.entry}"]
    words = [int.from_bytes(text[i : i + _WORD_BYTES], "little") for i in range(0, len(text), _WORD_BYTES)]
    line_of = dict(_line_numbers(sections[".nv_debug_line_sass"]))
    lines, line = [], 0
    for index in range(len(words)):
        line = line_of.get(index * _WORD_BYTES, line)
        lines.append(line)
    copies = _copies(compiled.ptx.split("\n"), words, lines)
    return tuple(
        MachineInstruction(
            word,
            line,
            _branch_target(word, index, compiled.cc) if word & 0x1FF == _BRA else None,
            _load_bytes(word, compiled.cc),
            copies.get(line, 1),
        )
        for index, (word, line) in enumerate(zip(words, lines, strict=True))
    )


def executed(code: tuple[MachineInstruction, ...], warps_by_line: Mapping[int, int]) -> Executed:
    """What was executed, given how many warps executed each line of the PTX."""
    by_pipe = dict.fromkeys(PIPES, 0.0)
    for instruction in code:
        if instruction.word & 0x1FF != _NOP:
            by_pipe[instruction.pipe] += warps_by_line.get(instruction.line, 0) / instruction.copies
    loaded = waited = 0.0
    for index, peak in _bytes_in_flight(code).items():
        load = code[index]
        nbytes = load.load_bytes * warps_by_line.get(load.line, 0) / load.copies
        loaded += nbytes
        waited += nbytes * peak
    in_flight = 32 * waited / loaded if loaded else 0.0
    return Executed(sum(by_pipe.values()), {pipe: n for pipe, n in by_pipe.items() if n}, in_flight)


@cache
def _bytes_in_flight(code: tuple[MachineInstruction, ...]) -> dict[int, int]:
    """Load → the most bytes a lane waits for while it waits for this one.

    A load is waited for from its issue until an instruction waits for its scoreboard (``cp.async``: until a wait leaves
    no more groups than are younger). Every loop is walked twice, so that what one iteration loads for the next counts;
    both sides of a branch are walked as they lie.
    """
    pending: list[int] = []
    groups: list[list[int]] = [[]]  # of cp.async; the last one is open
    peaks: dict[int, int] = {}
    for index in _walk(code):
        instruction = code[index]
        pending = [load for load in pending if not instruction.waits >> (code[load].sets or 0) & 1]
        if instruction.opcode == _DEPBAR:
            younger = instruction.word >> 38 & 0x3F
            groups = groups[max(len(groups) - 1 - younger, 0) :]
        elif instruction.opcode == _LDGDEPBAR:
            groups.append([])
        elif instruction.opcode == _LDGSTS and instruction.load_bytes:
            groups[-1].append(index)
        elif instruction.load_bytes and instruction.sets is not None:
            pending.append(index)
        elif instruction.opcode in (_EXIT, _RET) and not instruction.is_conditional:
            pending, groups = [], [[]]
        if instruction.load_bytes:
            waiting = [*pending, *(load for group in groups for load in group)]
            total = sum(code[load].load_bytes for load in waiting)
            for load in waiting:
                peaks[load] = max(peaks.get(load, 0), total)
    return peaks


def _walk(code: Sequence[MachineInstruction]) -> Iterator[int]:
    """Indices in order, the body of each loop once more where its branch back stands."""
    closed: set[int] = set()

    def span(first: int, end: int) -> Iterator[int]:
        for index in range(first, end):
            yield index
            target = code[index].target
            if target is not None and target <= index and index not in closed:
                closed.add(index)
                yield from span(target, index)

    return span(0, len(code))


# ---- lines -----------------------------------------------------------------------------------------------------------

_COUNTED = re.compile(
    r"\s*(?:@!?%p\d+\s+)?(?:ld\.(?!param)|st\.|mma|ldmatrix|cp\.async\.c[ag]|shfl|atom|red\.|ex2|bar)"
)
"""PTX that becomes one machine instruction."""


def _copies(ptx: Sequence[str], words: Sequence[int], lines: Sequence[int]) -> dict[int, int]:
    """Line of the PTX → how many copies of its basic block there are.

    What is one instruction in both languages tells, in the median of the block's; a block without such is taken to be
    there once.
    """
    found = Counter(line for word, line in zip(words, lines, strict=True) if _PIPE_OF.get(word & 0x1FF) in _TELLING)
    copies: dict[int, int] = {}
    block: list[int] = []
    for number, text in enumerate([*ptx, "end:"], 1):
        if text.rstrip().endswith(":") or "bra" in text:
            telling = [found[line] for line in block if found[line] and _COUNTED.match(ptx[line - 1])]
            if telling and median_low(telling) > 1:
                copies |= dict.fromkeys(block, median_low(telling))
            block = []
        block.append(number)
    return copies


# ---- the file --------------------------------------------------------------------------------------------------------


def _branch_target(word: int, index: int, cc: tuple[int, int]) -> int:
    """Bits 34 … 81 are the distance from the next instruction in units of 4 bytes; since 9.0, 16 … 23 are its end."""
    distance = word >> 34 & ((1 << 48) - 1)
    distance -= (distance >> 47) << 48
    if cc >= (9, 0):
        distance = distance << 8 | (word >> 16 & 0xFF)
    return index + 1 + distance * 4 // _WORD_BYTES


def _load_bytes(word: int, cc: tuple[int, int]) -> int:
    opcode = word & 0x1FF
    width = word >> 74 if opcode == _LDGSTS and cc >= (10, 0) else word >> 73
    return _ACCESS_BYTES.get(width & 7, 0) if opcode in (_LDG, _LDGSTS) else 0


def _sections(elf: bytes) -> dict[str, bytes]:
    """Name → contents (ELF-64, little-endian)."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", elf, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    found = {}
    for name, _, _, _, offset, nbytes, *_ in headers:
        start = names + name
        found[elf[start : elf.index(b"\0", start)].decode()] = elf[offset : offset + nbytes]
    return found


def _line_numbers(program: bytes) -> Iterator[tuple[int, int]]:
    """(address, line) of a DWARF line number program, version 2 or 3 (DWARF Debugging Information Format, §6.2)."""
    length, version, header_length = struct.unpack_from("<IHI", program, 0)
    assert version in (2, 3), f"DWARF line numbers of version {version}"
    unit, _, line_base, line_range, opcode_base = struct.unpack_from("<BBbBB", program, 10)
    operands = program[15 : 14 + opcode_base]
    at, address, line = 10 + header_length, 0, 1
    while at < 4 + length:
        opcode = program[at]
        at += 1
        if opcode >= opcode_base:
            advance = opcode - opcode_base
            address += advance // line_range * unit
            line += line_base + advance % line_range
            yield address, line
        elif opcode == 0:  # extended: length, then 1 ends the sequence, 2 sets the address
            nbytes, at = _uleb(program, at)
            if program[at] == 2:
                (address,) = struct.unpack_from("<Q", program, at + 1)
            elif program[at] == 1:
                return
            at += nbytes
        elif opcode == 1:
            yield address, line
        elif opcode == 2:
            distance, at = _uleb(program, at)
            address += distance * unit
        elif opcode == 3:
            distance, at = _sleb(program, at)
            line += distance
        elif opcode == 8:
            address += (255 - opcode_base) // line_range * unit
        elif opcode == 9:
            address += struct.unpack_from("<H", program, at)[0]
            at += 2
        else:
            for _ in range(operands[opcode - 1]):
                _, at = _uleb(program, at)


def _uleb(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at


def _sleb(data: bytes, at: int) -> tuple[int, int]:
    value, end = _uleb(data, at)
    bits = 7 * (end - at)
    return (value - (1 << bits) if value >> (bits - 1) & 1 else value), end
