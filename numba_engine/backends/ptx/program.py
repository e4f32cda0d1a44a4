"""A kernel ready to be bound: its blocks in order, its registers shaped and allotted, its variables laid out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from numba_engine.backends.ptx.cfg import BasicBlock, components, entries, order, regions_of, split
from numba_engine.backends.ptx.inlining import Flattener
from numba_engine.backends.ptx.operands import is_counted_barrier, is_non_coherent
from numba_engine.backends.ptx.parser import TYPE_BYTES, Address, Function, Module, Symbol, Variable
from numba_engine.backends.ptx.registers import (
    allot,
    check_defined,
    defined,
    live_registers,
    shape_bits,
    waiting_registers,
)

SHARED_GUARD_BYTES = 128
"""Distance between shared variables, so that running over the end of one is seen. A multiple of all 32 banks."""


@dataclass(slots=True)
class Program:
    """One kernel, ready to be bound to a number of blocks and threads."""

    name: str
    blocks: list[BasicBlock]
    registers: dict[str, str]
    bits: dict[str, int]
    slots: dict[str, int]
    """Register → number of its buffer among those of the same width and bits."""
    free_writes: list[frozenset[str]]
    """Per block: registers it defines of which no waiting lane needs its element, so that all may be written."""
    params: dict[str, tuple[int, Variable]]
    """Kernel parameter → (byte offset, declaration)."""
    param_bytes: int
    shared: dict[str, tuple[int, Variable]]
    shared_bytes: int
    """Static shared memory as a GPU would lay it out."""
    shared_extent: int
    """The same with guard gaps."""
    dynamic_shared: tuple[str, ...]
    """All names of the dynamic part: it begins at the same place under each."""
    local: dict[str, tuple[int, Variable]]
    local_bytes: int
    max_threads: int | None
    may_spin: bool
    """Some lanes may wait in a loop for others: nothing may be held once for several lanes."""
    shared_granule_log2: int
    reads_non_coherently: bool
    """By ld.global.nc, what no launch may write meanwhile."""


def build(module: Module, function: Function, name: str) -> Program:
    """Lay the kernel out. Raises PtxError for what is not supported, quoting the line."""
    flat = Flattener(module, name)
    flat.add(function, "", {}, {}, 0)
    blocks = order(split(flat))
    may_spin = _may_spin(blocks)
    regions = regions_of(blocks)
    bits = shape_bits(blocks, flat.registers, {variable.name for variable in function.params}, regions, may_spin)
    check_defined(blocks, name)
    live_in = live_registers(blocks)
    waiting = waiting_registers(blocks, regions, bits, live_in)
    params, param_bytes = _lay_out(function.params)
    shared_symbols = _used_symbols(blocks)
    shared_variables = [
        variable
        for variable in (*module.variables.values(), *flat.variables.values())
        if variable.space == "shared" and variable.name in shared_symbols
    ]
    dynamic = tuple(v.name for v in shared_variables if v.is_extern or v.nbytes == 0)
    static = [v for v in shared_variables if v.name not in dynamic]
    shared, extent = _lay_out(static, guard=SHARED_GUARD_BYTES)
    local, local_bytes = _lay_out([v for v in flat.variables.values() if v.space in ("local", "param")], guard=16)
    return Program(
        name=name,
        blocks=blocks,
        registers=flat.registers,
        bits=bits,
        slots=allot(blocks, flat.registers, bits, live_in, waiting),
        free_writes=[
            frozenset() if may_spin else frozenset(defined(block) - needed)
            for block, needed in zip(blocks, waiting, strict=True)
        ],
        params=params,
        param_bytes=param_bytes,
        shared=shared,
        shared_bytes=_lay_out(static)[1],
        shared_extent=extent,
        dynamic_shared=dynamic,
        local=local,
        local_bytes=local_bytes,
        max_threads=function.max_threads,
        may_spin=may_spin,
        shared_granule_log2=_shared_granule(blocks),
        reads_non_coherently=any(is_non_coherent(one) for block in blocks for one in block.instructions),
    )


def _used_symbols(blocks: list[BasicBlock]) -> set[str]:
    used = set()
    for block in blocks:
        for instruction in block.instructions:
            for operand in instruction.operands:
                if isinstance(operand, Address) and isinstance(operand.base, Symbol):
                    used.add(operand.base.name)
                elif isinstance(operand, Symbol):
                    used.add(operand.name)
    return used


def _lay_out(variables: Iterable[Variable], guard: int = 0) -> tuple[dict[str, tuple[int, Variable]], int]:
    placed: dict[str, tuple[int, Variable]] = {}
    end = 0
    for variable in variables:
        start = -(-end // variable.align) * variable.align
        if guard and placed:
            align = max(guard, variable.align)
            start = -(-(end + guard) // align) * align
        placed[variable.name] = (start, variable)
        end = start + variable.nbytes
    return placed, end


def _may_spin(blocks: list[BasicBlock]) -> bool:
    """A loop holds a read that another thread may be meant to answer, or groups of threads meet at counted barriers.

    Irreducible loops are taken for the same: what runs in them need not reconverge.
    """
    if any(is_counted_barrier(instruction) for block in blocks for instruction in block.instructions):
        return True
    nodes = set(range(len(blocks)))
    for component in components(nodes, 0, blocks):
        if len(component) == 1 and component[0] not in blocks[component[0]].successors:
            continue
        if len(entries(set(component), 0, blocks)) > 1:
            return True
        for index in component:
            for instruction in blocks[index].instructions:
                parts = set(instruction.parts)
                if instruction.name == "ld" and parts & {"acquire", "volatile", "relaxed"}:
                    return True
                if instruction.name == "atom" and parts & {"cas", "exch", "acquire", "acq_rel", "or", "and"}:
                    return True
                if instruction.name == "mbarrier" and parts & {"try_wait", "test_wait"}:
                    return True
    return False


def _shared_granule(blocks: list[BasicBlock]) -> int:
    """log2 of the narrowest access to shared memory: the unit in which races are looked for."""
    narrowest = 4
    for block in blocks:
        for instruction in block.instructions:
            if instruction.name in ("ld", "st", "atom", "red"):
                kind = instruction.parts[-1]
                narrowest = min(narrowest, TYPE_BYTES.get(kind, 4))
    return {1: 0, 2: 1, 4: 2}[narrowest]
