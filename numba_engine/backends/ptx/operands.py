"""What an instruction reads and writes, whom it waits for, and what special registers depend on."""

from __future__ import annotations

from numba_engine.backends.ptx.parser import Address, Instruction, Operand, Pair, Register, Vector

BLOCK, THREAD = 1, 2
"""What a value may depend on; bits of a set."""
CARRY = "%carry"
"""The condition code register, kept as one more predicate."""

_USES_CARRY = frozenset({"addc", "subc", "madc"})
_NO_DESTINATION = frozenset(
    {"st", "red", "bar", "barrier", "bra", "brx", "call", "ret", "exit", "trap", "membar", "fence", "prefetch"}
    | {"prefetchu", "cp", "discard", "applypriority", "nanosleep", "griddepcontrol", "stmatrix"}
)
_WARP_SYNC = frozenset({"shfl", "vote", "match", "redux", "mma", "ldmatrix", "stmatrix", "elect"})
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


def is_non_coherent(instruction: Instruction) -> bool:
    """A load through a cache that does not see what the launch writes."""
    return instruction.name == "ld" and "nc" in instruction.parts


def is_counted_barrier(instruction: Instruction) -> bool:
    if instruction.name not in ("bar", "barrier") or "warp" in instruction.parts:
        return False
    return len(instruction.operands) > (3 if "red" in instruction.parts else 1)


def special_bits(name: str) -> int:
    return _SPECIAL_BITS.get(name.rsplit(".", 1)[0], 0)


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
