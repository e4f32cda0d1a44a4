"""What each register depends on, and which buffer holds it.

All lanes of a batch run in lockstep, so a value that cannot differ between threads, or between blocks, is held once.
``bits`` of a register say what it depends on: BLOCK, THREAD, both or neither; its array is ``[blocks or 1, threads or
1]``. A register inherits the bits of what it is computed from and of every branch that decides whether its definition
runs while the other side waits (Coutinho et al. 2011, "Divergence analysis and optimizations").
"""

from __future__ import annotations

from numba_engine.backends.ptx.cfg import BasicBlock, Region
from numba_engine.backends.ptx.errors import PtxError
from numba_engine.backends.ptx.operands import BLOCK, THREAD, destinations, is_special, sources, special_bits
from numba_engine.backends.ptx.parser import TYPE_BYTES, Address, Instruction, Symbol

_THREAD_RESULT = frozenset(
    {"shfl", "vote", "match", "redux", "elect", "activemask", "atom", "mma", "ldmatrix", "mbarrier", "bar", "barrier"}
)


def shape_bits(
    blocks: list[BasicBlock],
    registers: dict[str, str],
    params: set[str],
    regions: dict[int, Region],
    may_spin: bool,
) -> dict[str, int]:
    if may_spin:
        return dict.fromkeys(registers, BLOCK | THREAD)
    bits = dict.fromkeys(registers, 0)
    control = [0] * len(blocks)
    changed = True
    while changed:
        changed = False
        for index, block in enumerate(blocks):
            for instruction in block.instructions:
                written = destinations(instruction)
                if not written:
                    continue
                # What one instruction writes has one shape.
                value = control[index] | _result_bits(instruction, bits, params)
                for name in written:
                    value |= bits.get(name, 0)
                for name in written:
                    if bits.get(name, 3) | value != bits.get(name, 3):
                        bits[name] |= value
                        changed = True
        for index, region in regions.items():
            value = _branch_bits(blocks[index], bits)
            for member in region.members:
                if control[member] | value != control[member]:
                    control[member] |= value
                    changed = True
    return bits


def _result_bits(instruction: Instruction, bits: dict[str, int], params: set[str]) -> int:
    value = 0
    for name in sources(instruction):
        value |= bits[name] if name in bits else special_bits(name)
    if instruction.name in _THREAD_RESULT:
        value |= BLOCK | THREAD
    if instruction.name == "ld" and "param" not in instruction.parts:
        if "shared" in instruction.parts or "shared::cta" in instruction.parts:
            value |= BLOCK
        elif not {"global", "const"} & set(instruction.parts):
            value |= BLOCK | THREAD
    if instruction.name == "ld" and "param" in instruction.parts:
        address = instruction.operands[1]
        if not (isinstance(address, Address) and isinstance(address.base, Symbol) and address.base.name in params):
            value |= BLOCK | THREAD
    return value


def _branch_bits(block: BasicBlock, bits: dict[str, int]) -> int:
    """What the decision at the block's end depends on."""
    assert block.terminator is not None
    value = 0
    for name in sources(block.terminator):
        value |= bits.get(name, special_bits(name))
    return value


def check_defined(blocks: list[BasicBlock], kernel: str) -> None:
    written = {name for block in blocks for at in block.instructions for name in destinations(at)}
    for block in blocks:
        for at in (*block.instructions, *([block.terminator] if block.terminator else [])):
            for name in sources(at):
                if name not in written and not is_special(name):
                    raise PtxError(
                        "uninitialised-register",
                        f"{name} is read and never written",
                        kernel=kernel,
                        line=at.line,
                        text=at.text,
                    )


def waiting_registers(
    blocks: list[BasicBlock], regions: dict[int, Region], bits: dict[str, int], live_in: list[set[str]]
) -> list[set[str]]:
    """Per block: the registers that lanes may still need which wait elsewhere while the block runs."""
    waiting: list[set[str]] = [set() for _ in blocks]
    for index, region in regions.items():
        if not _branch_bits(blocks[index], bits):
            continue
        needed: set[str] = set()
        for place in region.members if region.meeting is None else [*region.members, region.meeting]:
            needed |= live_in[place]
        for member in region.members:
            waiting[member] |= needed
    return waiting


def defined(block: BasicBlock) -> set[str]:
    return {name for instruction in block.instructions for name in destinations(instruction)}


def allot(
    blocks: list[BasicBlock],
    registers: dict[str, str],
    bits: dict[str, int],
    live_in: list[set[str]],
    waiting: list[set[str]],
) -> dict[str, int]:
    """Linear scan (Poletto & Sarkar 1999): registers that are never live together share a buffer, so that the buffers
    in use stay in cache."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}

    def touch(name: str, at: int) -> None:
        first[name] = min(first.get(name, at), at)
        last[name] = max(last.get(name, at), at)

    position = 0
    for block, entering, needed in zip(blocks, live_in, waiting, strict=True):
        for name in (*entering, *needed):
            touch(name, position)
        for instruction in block.instructions:
            position += 1
            for name in (*sources(instruction), *destinations(instruction)):
                touch(name, position)
        position += 1
        if block.terminator is not None:
            for name in sources(block.terminator):
                touch(name, position)
        for name in needed:
            touch(name, position)
        for successor in block.successors:
            for name in live_in[successor]:
                touch(name, position)
        position += 1
    slots: dict[str, int] = {}
    free: dict[tuple[int, int], list[int]] = {}
    used: dict[tuple[int, int], int] = {}
    active: list[tuple[int, str]] = []
    for name in sorted((n for n in first if n in registers), key=lambda n: first[n]):
        still = []
        for end, other in active:
            # Strictly before: a destination never shares the buffer of a source of its own instruction.
            if end < first[name]:
                free.setdefault(_register_class(other, registers, bits), []).append(slots[other])
            else:
                still.append((end, other))
        active = still
        kind = _register_class(name, registers, bits)
        if free.get(kind):
            slots[name] = free[kind].pop()
        else:
            slots[name] = used.get(kind, 0)
            used[kind] = slots[name] + 1
        active.append((last[name], name))
    return slots


def _register_class(name: str, registers: dict[str, str], bits: dict[str, int]) -> tuple[int, int]:
    return TYPE_BYTES[registers[name]], bits[name]


def live_registers(blocks: list[BasicBlock]) -> list[set[str]]:
    uses: list[set[str]] = []
    defs: list[set[str]] = []
    for block in blocks:
        used: set[str] = set()
        defined: set[str] = set()
        for instruction in (*block.instructions, *([block.terminator] if block.terminator else [])):
            used |= set(sources(instruction)) - defined
            if instruction.guard is None:
                defined |= set(destinations(instruction))
            else:
                # A guarded definition keeps the old value of the lanes it skips.
                used |= set(destinations(instruction)) - defined
        uses.append(used)
        defs.append(defined)
    live: list[set[str]] = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for index in range(len(blocks) - 1, -1, -1):
            out: set[str] = set()
            for successor in blocks[index].successors:
                out |= live[successor]
            new = uses[index] | (out - defs[index])
            if new != live[index]:
                live[index] = new
                changed = True
    return live
