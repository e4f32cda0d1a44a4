"""Basic blocks, the order in which they run, and where diverging lanes meet again.

Blocks are numbered so that a branch's reconvergence point, and the code behind a loop, come after everything that runs
before them; the machine always runs the waiting lanes with the lowest number, so lanes meet again at the immediate
post-dominator at the latest (thread frontiers, Diamos et al. 2011).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from numba_engine.backends.ptx.inlining import Flattener
from numba_engine.backends.ptx.operands import is_sync
from numba_engine.backends.ptx.parser import Instruction, Label, Operand, Symbol

_EXITS = frozenset({"ret", "exit", "trap"})


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


def split(flat: Flattener) -> list[BasicBlock]:
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


def _target(flat: Flattener, starts: dict[str, int], operand: Operand, at: Instruction) -> int:
    if not isinstance(operand, Symbol) or operand.name not in starts:
        raise flat.error("syntax", f"branch to an unknown label {operand}", at)
    return starts[operand.name]


def order(blocks: list[BasicBlock]) -> list[BasicBlock]:
    """Number the reachable blocks so that what runs behind a loop or a branch has the higher number."""
    order = _topological(set(reachable(blocks, [0])), 0, blocks)
    position = {old: new for new, old in enumerate(order)}
    return [
        replace(
            blocks[old],
            targets=tuple(position[t] for t in blocks[old].targets),
            fallthrough=None if blocks[old].fallthrough is None else position[blocks[old].fallthrough],  # type: ignore[index]
        )
        for old in order
    ]


def reachable(blocks: list[BasicBlock], starts: Iterable[int], stop: int | None = None) -> list[int]:
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
    for component in components(nodes, entry, blocks):
        if len(component) == 1:
            order.extend(component)
            continue
        inside = set(component)
        header = min(entries(inside, entry, blocks))
        rest = inside - {header}
        start = next((s for s in blocks[header].successors if s in rest), min(rest))
        body = [header, *_topological(rest, start, blocks)]
        returning = [n for n in body if header in blocks[n].successors]
        if returning != body[-1:]:
            body.append(_add_latch(returning, header, blocks))
        order.extend(body)
    return order


def entries(inside: set[int], entry: int, blocks: list[BasicBlock]) -> set[int]:
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


def components(nodes: set[int], entry: int, blocks: list[BasicBlock]) -> list[list[int]]:
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


@dataclass(frozen=True, slots=True)
class Region:
    """The blocks whose execution a branch decides while other lanes wait, and where all meet again."""

    members: list[int]
    meeting: int | None


def regions_of(blocks: list[BasicBlock]) -> dict[int, Region]:
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
        regions[index] = Region(reachable(reduced, reduced[index].targets, stop=meeting), meeting)
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
