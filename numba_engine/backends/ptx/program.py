"""A kernel as basic blocks in execution order: calls inlined, variables laid out, registers shaped and allotted.

Shapes. All lanes of a batch run in lockstep, so a value that cannot differ between threads, or between blocks, is held
once. ``bits`` of a register say what it depends on: BLOCK, THREAD, both or neither; its array is ``[blocks or 1,
threads or 1]``. A register inherits the bits of what it is computed from and of every branch that decides whether its
definition runs while the other side waits (Coutinho et al. 2011, "Divergence analysis and optimizations").

Order. Blocks are numbered so that a branch's reconvergence point, and the code behind a loop, come after everything
that runs before them; the machine always runs the waiting lanes with the lowest number, so lanes meet again at the
immediate post-dominator at the latest (thread frontiers, Diamos et al. 2011).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from numba_engine.backends.ptx.errors import ErrorKind, PtxError
from numba_engine.backends.ptx.parser import (
    TYPE_BYTES,
    Address,
    Function,
    Immediate,
    Instruction,
    Label,
    Module,
    Operand,
    Pair,
    Register,
    Symbol,
    Variable,
    Vector,
)

BLOCK, THREAD = 1, 2
SHARED_GUARD_BYTES = 128
"""Distance between shared variables, so that running over the end of one is seen. A multiple of all 32 banks."""

CARRY = "%carry"
"""The condition code register, kept as one more predicate."""

_MAX_INLINE_DEPTH = 32
_USES_CARRY = frozenset({"addc", "subc", "madc"})
_EXITS = frozenset({"ret", "exit", "trap"})
_NO_DESTINATION = frozenset(
    {"st", "red", "bar", "barrier", "bra", "brx", "call", "ret", "exit", "trap", "membar", "fence", "prefetch"}
    | {"prefetchu", "cp", "discard", "applypriority", "nanosleep", "griddepcontrol", "stmatrix"}
)
_WARP_SYNC = frozenset({"shfl", "vote", "match", "redux", "mma", "ldmatrix", "stmatrix", "elect"})
_THREAD_RESULT = frozenset(
    {"shfl", "vote", "match", "redux", "elect", "activemask", "atom", "mma", "ldmatrix", "mbarrier", "bar", "barrier"}
)
_DYNAMIC_SPECIALS = ("%clock", "%clock64", "%clock_hi", "%globaltimer", "%globaltimer_lo", "%globaltimer_hi")
_SPECIAL_BITS = {
    "%tid": THREAD,
    "%laneid": THREAD,
    "%warpid": THREAD,
    "%lanemask_eq": THREAD,
    "%lanemask_lt": THREAD,
    "%lanemask_le": THREAD,
    "%lanemask_gt": THREAD,
    "%lanemask_ge": THREAD,
    "%ctaid": BLOCK,
    "%smid": BLOCK,
    **dict.fromkeys(_DYNAMIC_SPECIALS, BLOCK | THREAD),
}


@dataclass(slots=True)
class BasicBlock:
    """Straight-line code. A synchronising instruction stands first in its block, a control transfer last."""

    instructions: list[Instruction] = field(default_factory=list)
    terminator: Instruction | None = None
    targets: tuple[int, ...] = ()
    """Where the terminator may jump."""
    fallthrough: int | None = None
    label: str | None = None

    @property
    def successors(self) -> tuple[int, ...]:
        return self.targets if self.fallthrough is None else (*self.targets, self.fallthrough)

    @property
    def is_pure_exit(self) -> bool:
        return not self.instructions and self.terminator is not None and self.terminator.name in ("ret", "exit")


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
    dynamic_shared: str | None
    local: dict[str, tuple[int, Variable]]
    local_bytes: int
    max_threads: int | None
    may_spin: bool
    """Some lanes may wait in a loop for others: nothing may be held once for several lanes."""
    shared_granule_log2: int


def build(module: Module, function: Function, name: str) -> Program:
    """Lay the kernel out. Raises PtxError for what is not supported, quoting the line."""
    flat = _Flattener(module, function, name)
    flat.add(function, "", {}, {}, 0)
    blocks = _order(_split(flat))
    may_spin = _may_spin(blocks)
    regions = _regions(blocks)
    bits = _shape_bits(blocks, flat.registers, {variable.name for variable in function.params}, regions, may_spin)
    _check_defined(blocks, name)
    live_in = _live_in(blocks)
    waiting = _waiting(blocks, regions, bits, live_in)
    params, param_bytes = _lay_out(function.params)
    shared_symbols = _used_symbols(blocks)
    shared_variables = [
        variable
        for variable in (*module.variables.values(), *flat.variables.values())
        if variable.space == "shared" and variable.name in shared_symbols
    ]
    dynamic = next((v.name for v in shared_variables if v.is_extern or v.nbytes == 0), None)
    static = [v for v in shared_variables if v.name != dynamic]
    shared, extent = _lay_out(static, guard=SHARED_GUARD_BYTES)
    local, local_bytes = _lay_out([v for v in flat.variables.values() if v.space in ("local", "param")], guard=16)
    return Program(
        name=name,
        blocks=blocks,
        registers=flat.registers,
        bits=bits,
        slots=_allot(blocks, flat.registers, bits, live_in, waiting),
        free_writes=[
            frozenset() if may_spin else frozenset(_defined(block) - needed)
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
    )


# ---- operands --------------------------------------------------------------------------------------------------------


def destinations(instruction: Instruction) -> list[str]:
    """Registers the instruction writes, the carry flag included."""
    written = _written(instruction)
    return [*written, CARRY] if "cc" in instruction.parts else written


def _written(instruction: Instruction) -> list[str]:
    if not instruction.operands or instruction.name in _NO_DESTINATION:
        if instruction.name in ("bar", "barrier") and "red" in instruction.parts:
            return _registers_of(instruction.operands[0])
        return []
    if instruction.name == "mbarrier" and not isinstance(instruction.operands[0], Register):
        return []
    return _registers_of(instruction.operands[0])


def sources(instruction: Instruction) -> list[str]:
    """Registers the instruction reads, its guard included."""
    written = bool(_written(instruction)) or (
        bool(instruction.operands)
        and instruction.name not in _NO_DESTINATION
        and not isinstance(instruction.operands[0], Address)
    )
    operands = instruction.operands[1:] if written else instruction.operands
    found = [name for operand in operands for name in _registers_of(operand)]
    if instruction.guard is not None:
        found.append(instruction.guard.name)
    if instruction.name in _USES_CARRY:
        found.append(CARRY)
    return found


def _registers_of(operand: Operand) -> list[str]:
    match operand:
        case Register(name):
            return [name]
        case Address(Register(name)):
            return [name]
        case Vector(items):
            return [name for item in items for name in _registers_of(item)]
        case Pair(first, second):
            return _registers_of(first) + _registers_of(second)
    return []


def is_sync(instruction: Instruction) -> bool:
    """Lanes wait here for others."""
    if instruction.name in _WARP_SYNC:
        return "sync" in instruction.parts
    return instruction.name in ("bar", "barrier") and "arrive" not in instruction.parts


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


# ---- inlining --------------------------------------------------------------------------------------------------------


class _Flattener:
    """Copies function bodies into one, with every register, label and variable of a callee made unique."""

    def __init__(self, module: Module, kernel: Function, name: str) -> None:
        self.module = module
        self.name = name
        self.registers: dict[str, str] = {CARRY: "pred"}
        self.variables: dict[str, Variable] = {}
        self.branch_targets: dict[str, tuple[str, ...]] = {}
        self.body: list[Instruction | Label] = []
        self.count = 0
        del kernel

    def error(self, kind: ErrorKind, message: str, at: Instruction) -> PtxError:
        return PtxError(kind, message, kernel=self.name, line=at.line, text=at.text)

    def add(self, function: Function, suffix: str, params: dict[str, str], labels: dict[str, str], depth: int) -> None:
        """``params`` maps the callee's parameters to the caller's variables; ``labels`` holds its return label."""
        for name, kind in function.registers.items():
            self.registers[name + suffix] = kind
        for name, variable in function.variables.items():
            self.variables[name + suffix] = replace(variable, name=name + suffix)
        for name, targets in function.branch_targets.items():
            self.branch_targets[name + suffix] = tuple(target + suffix for target in targets)

        def unique(operand: Operand) -> Operand:
            match operand:
                case Register(name, negated) if name in function.registers:
                    return Register(name + suffix, negated)
                case Symbol(name, offset):
                    if name in params:
                        return Symbol(params[name], offset)
                    if name in function.variables or name in known_labels:
                        return Symbol(name + suffix, offset)
                case Address(base, offset) if base is not None:
                    renamed = unique(base)
                    assert isinstance(renamed, Register | Symbol)
                    return Address(renamed, offset)
                case Vector(items):
                    return Vector(tuple(map(unique, items)))
                case Pair(first, second):
                    return Pair(unique(first), unique(second))
            return operand

        known_labels = {item.name for item in function.body if isinstance(item, Label)} | set(function.branch_targets)
        for item in function.body:
            if isinstance(item, Label):
                self.body.append(Label(item.name + suffix))
                continue
            instruction = item
            if suffix or params:
                guard = unique(item.guard) if item.guard else None
                assert guard is None or isinstance(guard, Register)
                instruction = replace(item, operands=tuple(map(unique, item.operands)), guard=guard)
            if instruction.name == "call":
                self.skip_unless_guarded(instruction, lambda at: self.call(at, depth))
            elif instruction.name == "ret" and depth:
                self.body.append(replace(instruction, parts=("bra",), operands=(Symbol(labels["return"]),)))
            elif instruction.guard is not None and is_sync(instruction):
                self.skip_unless_guarded(instruction, self.body.append)
            else:
                self.body.append(instruction)

    def skip_unless_guarded(self, instruction: Instruction, emit: object) -> None:
        """``@p op`` → a branch around op, so that op itself stands unguarded."""
        assert callable(emit)
        if instruction.guard is None:
            emit(instruction)
            return
        self.count += 1
        behind = f"$skip{self.count}"
        guard = replace(instruction.guard, negated=not instruction.guard.negated)
        self.body.append(replace(instruction, parts=("bra",), operands=(Symbol(behind),), guard=guard))
        emit(replace(instruction, guard=None))
        self.body.append(Label(behind))

    def call(self, at: Instruction, depth: int) -> None:
        operands = list(at.operands)
        returned = operands.pop(0) if operands and isinstance(operands[0], Vector) else Vector(())
        target = operands.pop(0) if operands else None
        if not isinstance(target, Symbol):
            raise self.error("unsupported", "indirect calls are not supported", at)
        callee = self.module.functions.get(target.name)
        if callee is None:
            known = ", ".join(sorted(self.module.functions))
            raise self.error("unsupported", f"no body for function {target.name}; the module has: {known}", at)
        if depth >= _MAX_INLINE_DEPTH:
            raise self.error("unsupported", f"calls nest deeper than {_MAX_INLINE_DEPTH}: recursion?", at)
        passed = operands[0] if operands else Vector(())
        assert isinstance(returned, Vector)
        assert isinstance(passed, Vector)
        actual = [item.name for item in (*returned.items, *passed.items) if isinstance(item, Symbol)]
        formal = [variable.name for variable in (*callee.returns, *callee.params)]
        if len(actual) != len(formal):
            raise self.error("syntax", f"{target.name} takes {len(formal)} parameters, the call has {len(actual)}", at)
        self.count += 1
        suffix = f"#{self.count}"
        behind = f"$return{self.count}"
        self.add(callee, suffix, dict(zip(formal, actual, strict=True)), {"return": behind}, depth + 1)
        self.body.append(Label(behind))


# ---- control flow ----------------------------------------------------------------------------------------------------


def _split(flat: _Flattener) -> list[BasicBlock]:
    """Basic blocks in text order, block 0 the entry; the last falls into an exit."""
    blocks = [BasicBlock()]
    starts: dict[str, int] = {}
    for item in flat.body:
        if isinstance(item, Label):
            if blocks[-1].instructions or blocks[-1].label is not None:
                blocks.append(BasicBlock())
            blocks[-1].label = blocks[-1].label or item.name
            starts[item.name] = len(blocks) - 1
        elif item.name in _EXITS or item.name in ("bra", "brx"):
            blocks[-1].terminator = item
            blocks.append(BasicBlock())
        else:
            if is_sync(item) and blocks[-1].instructions:
                blocks.append(BasicBlock())
            blocks[-1].instructions.append(item)
    if blocks[-1].terminator is None:
        blocks[-1].terminator = Instruction(("ret",), (), None, 0, "ret", None)
    for index, block in enumerate(blocks):
        end = block.terminator
        if end is None or end.guard is not None:
            block.fallthrough = index + 1
        if end is not None and end.name == "bra":
            block.targets = (_target(flat, starts, end.operands[0], end),)
            if end.guard is None:
                block.terminator = None
                block.fallthrough, block.targets = block.targets[0], ()
        elif end is not None and end.name == "brx":
            table = end.operands[1]
            assert isinstance(table, Symbol)
            if table.name not in flat.branch_targets:
                raise flat.error("syntax", f"no .branchtargets {table.name}", end)
            block.targets = tuple(_target(flat, starts, Symbol(t), end) for t in flat.branch_targets[table.name])
    return blocks


def _target(flat: _Flattener, starts: dict[str, int], operand: Operand, at: Instruction) -> int:
    if not isinstance(operand, Symbol) or operand.name not in starts:
        raise flat.error("syntax", f"branch to an unknown label {operand}", at)
    return starts[operand.name]


def _order(blocks: list[BasicBlock]) -> list[BasicBlock]:
    """Number the reachable blocks so that what runs behind a loop or a branch has the higher number."""
    order = _topological(set(_reachable(blocks, [0])), 0, blocks)
    position = {old: new for new, old in enumerate(order)}
    return [
        replace(
            blocks[old],
            targets=tuple(position[t] for t in blocks[old].targets),
            fallthrough=None if blocks[old].fallthrough is None else position[blocks[old].fallthrough],  # type: ignore[index]
        )
        for old in order
    ]


def _reachable(blocks: list[BasicBlock], starts: Iterable[int], stop: int | None = None) -> list[int]:
    seen: dict[int, None] = {}
    pending = list(starts)
    while pending:
        index = pending.pop()
        if index in seen or index == stop:
            continue
        seen[index] = None
        pending.extend(blocks[index].successors)
    return list(seen)


def _topological(nodes: set[int], entry: int, blocks: list[BasicBlock]) -> list[int]:
    """Components in topological order, each loop's header first and its body ordered likewise."""
    order: list[int] = []
    for component in _components(nodes, entry, blocks):
        if len(component) == 1:
            order.extend(component)
            continue
        inside = set(component)
        entries = _entries(inside, entry, blocks)
        header = min(entries)
        rest = inside - {header}
        start = next((s for s in blocks[header].successors if s in rest), min(rest))
        body = [header, *_topological(rest, start, blocks)]
        returning = [n for n in body if header in blocks[n].successors]
        if returning != body[-1:]:
            body.append(_add_latch(returning, header, blocks))
        order.extend(body)
    return order


def _entries(inside: set[int], entry: int, blocks: list[BasicBlock]) -> set[int]:
    """The blocks of a loop that are jumped to from outside of it; more than one makes it irreducible."""
    outside = (block for index, block in enumerate(blocks) if index not in inside)
    return {s for block in outside for s in block.successors if s in inside} | (inside & {entry, 0})


def _add_latch(returning: list[int], header: int, blocks: list[BasicBlock]) -> int:
    """An empty block at the end of a loop through which all go back to its header.

    So lanes that continue early wait there for the others of the same iteration, instead of running ahead.
    """
    latch = len(blocks)
    for index in returning:
        block = blocks[index]
        block.targets = tuple(latch if target == header else target for target in block.targets)
        block.fallthrough = latch if block.fallthrough == header else block.fallthrough
    blocks.append(BasicBlock(fallthrough=header))
    return latch


def _components(nodes: set[int], entry: int, blocks: list[BasicBlock]) -> list[list[int]]:
    """Strongly connected components of ``nodes`` in topological order (Tarjan 1972), iteratively."""
    number: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    found: list[list[int]] = []
    roots = [entry, *sorted(nodes - {entry})]
    for root in roots:
        if root in number or root not in nodes:
            continue
        work = [(root, iter(_inner_successors(root, nodes, blocks)))]
        number[root] = low[root] = len(number)
        stack.append(root)
        on_stack.add(root)
        while work:
            node, pending = work[-1]
            for successor in pending:
                if successor not in number:
                    number[successor] = low[successor] = len(number)
                    stack.append(successor)
                    on_stack.add(successor)
                    work.append((successor, iter(_inner_successors(successor, nodes, blocks))))
                    break
                if successor in on_stack:
                    low[node] = min(low[node], number[successor])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == number[node]:
                    component = []
                    while True:
                        member = stack.pop()
                        on_stack.discard(member)
                        component.append(member)
                        if member == node:
                            break
                    found.append(component)
    return found[::-1]


def _inner_successors(node: int, nodes: set[int], blocks: list[BasicBlock]) -> list[int]:
    return [s for s in blocks[node].successors if s in nodes]


def _may_spin(blocks: list[BasicBlock]) -> bool:
    """A loop holds a read that another thread may be meant to answer, or groups of threads meet at counted barriers.

    Irreducible loops are taken for the same: what runs in them need not reconverge.
    """
    if any(_is_counted_barrier(instruction) for block in blocks for instruction in block.instructions):
        return True
    nodes = set(range(len(blocks)))
    for component in _components(nodes, 0, blocks):
        if len(component) == 1 and component[0] not in blocks[component[0]].successors:
            continue
        if len(_entries(set(component), 0, blocks)) > 1:
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


def _is_counted_barrier(instruction: Instruction) -> bool:
    if instruction.name not in ("bar", "barrier") or "warp" in instruction.parts:
        return False
    return len(instruction.operands) > (3 if "red" in instruction.parts else 1)


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _shape_bits(
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
        value |= bits[name] if name in bits else _special_bits(name)
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


def _special_bits(name: str) -> int:
    return _SPECIAL_BITS.get(name.rsplit(".", 1)[0], 0)


def _branch_bits(block: BasicBlock, bits: dict[str, int]) -> int:
    """What the decision at the block's end depends on."""
    assert block.terminator is not None
    value = 0
    for name in sources(block.terminator):
        value |= bits.get(name, _special_bits(name))
    return value


@dataclass(frozen=True, slots=True)
class Region:
    """The blocks whose execution a branch decides while other lanes wait, and where all meet again."""

    members: list[int]
    meeting: int | None


def _regions(blocks: list[BasicBlock]) -> dict[int, Region]:
    """By branching block.

    Lanes that only exit never read a register again, so an edge to a bare exit does not count.
    """
    reduced = []
    for block in blocks:
        alive = tuple(dict.fromkeys(s for s in block.successors if not blocks[s].is_pure_exit))
        reduced.append(BasicBlock(targets=alive))
    post_dominator = _immediate_post_dominators(reduced)
    regions = {}
    for index, block in enumerate(blocks):
        if block.terminator is None or len(reduced[index].targets) < 2:
            continue
        meeting = post_dominator[index]
        regions[index] = Region(_reachable(reduced, reduced[index].targets, stop=meeting), meeting)
    return regions


def _immediate_post_dominators(blocks: list[BasicBlock]) -> list[int | None]:
    """Per block; None where only the end of the program post-dominates (or nothing does)."""
    exit_node = len(blocks)
    everything = (1 << (exit_node + 1)) - 1
    sets = [everything] * exit_node + [1 << exit_node]
    changed = True
    while changed:
        changed = False
        for index in range(exit_node - 1, -1, -1):
            meet = everything
            for successor in blocks[index].successors or (exit_node,):
                meet &= sets[successor]
            new = meet | (1 << index)
            if new != sets[index]:
                sets[index] = new
                changed = True
    result: list[int | None] = []
    for index in range(exit_node):
        strict = sets[index] & ~(1 << index)
        chosen: int | None = None
        for candidate in range(exit_node):
            # The nearest one is post-dominated by all the others.
            if strict >> candidate & 1 and sets[candidate] == strict:
                chosen = candidate
                break
        result.append(chosen)
    return result


# ---- registers -------------------------------------------------------------------------------------------------------


def _check_defined(blocks: list[BasicBlock], kernel: str) -> None:
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


def is_special(name: str) -> bool:
    base = name.rsplit(".", 1)[0]
    return base in _SPECIAL_BITS or base in (
        "%ntid",
        "%nctaid",
        "%nwarpid",
        "%nsmid",
        "%dynamic_smem_size",
        "%total_smem_size",
        "%gridid",
        "WARP_SZ",
    )


def _waiting(
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


def _defined(block: BasicBlock) -> set[str]:
    return {name for instruction in block.instructions for name in destinations(instruction)}


def _allot(
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


def _live_in(blocks: list[BasicBlock]) -> list[set[str]]:
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


def _shared_granule(blocks: list[BasicBlock]) -> int:
    """log2 of the narrowest access to shared memory: the unit in which races are looked for."""
    narrowest = 4
    for block in blocks:
        for instruction in block.instructions:
            if instruction.name in ("ld", "st", "atom", "red"):
                kind = instruction.parts[-1]
                narrowest = min(narrowest, TYPE_BYTES.get(kind, 4))
    return {1: 0, 2: 1, 4: 2}[narrowest]


def immediate(operand: Operand) -> int | None:
    """The value of an integer literal, None for anything else."""
    return operand.value if isinstance(operand, Immediate) and isinstance(operand.value, int) else None
