"""Random structured programs, thread by thread in Python against the executor.

Conditions depend on the thread, on the block, on both or on neither, so values are held once or per lane, lanes diverge
in nested loops, leave them early and continue them early, and registers share buffers while some lanes wait.
"""

from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from numba_engine.backends.ptx import PtxDevice
from tests.ptx.snippets import HEADER

NUM_VARIABLES = 8
GRID, BLOCK = 3, 40
MASK = 0xFFFFFFFF


@dataclass
class Assign:
    target: int
    operation: str
    left: int
    right: int | str


@dataclass
class Condition:
    left: int
    bits: int
    value: int


@dataclass
class If:
    condition: Condition
    then: list[Statement] = field(default_factory=list)
    otherwise: list[Statement] = field(default_factory=list)


@dataclass
class Loop:
    """At most ``limit`` rounds, of which the variable's low bits choose the number."""

    counter: int
    bound: int
    limit: int
    body: list[Statement] = field(default_factory=list)


@dataclass
class Jump:
    """break, continue or return where the condition holds."""

    kind: str
    condition: Condition


Statement = Assign | If | Loop | Jump
OPERATIONS = {
    "add.u32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "mul.lo.u32": lambda a, b: a * b,
    "xor.b32": lambda a, b: a ^ b,
    "and.b32": lambda a, b: a & b,
    "max.u32": max,
}


class Generator:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_loops = 0

    def block(self, depth: int, in_loop: bool) -> list[Statement]:
        return [self.statement(depth, in_loop) for _ in range(self.random.randint(2, 4))]

    def statement(self, depth: int, in_loop: bool) -> Statement:
        pick = self.random.random()
        if depth and pick < 0.25:
            otherwise = self.block(depth - 1, in_loop) if self.random.random() < 0.5 else []
            return If(self.condition(), self.block(depth - 1, in_loop), otherwise)
        if depth and pick < 0.45:
            self.num_loops += 1
            loop = Loop(self.num_loops, self.random.randrange(NUM_VARIABLES), self.random.choice([3, 7]))
            loop.body = self.block(depth - 1, True)
            return loop
        if pick < 0.6 and in_loop:
            return Jump(self.random.choice(["break", "continue", "continue"]), self.condition())
        if pick < 0.62:
            return Jump("return", self.condition())
        right: int | str = self.random.randrange(NUM_VARIABLES)
        if self.random.random() < 0.4:
            right = str(self.random.randint(1, 99))
        return Assign(
            self.random.randrange(NUM_VARIABLES),
            self.random.choice(list(OPERATIONS)),
            self.random.randrange(NUM_VARIABLES),
            right,
        )

    def condition(self) -> Condition:
        bits = self.random.choice([1, 2, 3, 4])
        return Condition(self.random.randrange(NUM_VARIABLES), bits, self.random.randint(0, bits))


class Left(Exception):
    """A thread leaves its loop, its round, or the kernel."""


def interpret(program: list[Statement], values: list[int]) -> None:
    def holds(condition: Condition) -> bool:
        return values[condition.left] & condition.bits == condition.value

    for statement in program:
        match statement:
            case Assign(target, operation, left, right):
                other = int(right) if isinstance(right, str) else values[right]
                values[target] = OPERATIONS[operation](values[left], other) & MASK
            case If(condition, then, otherwise):
                interpret(then if holds(condition) else otherwise, values)
            case Loop(_, bound, limit, body):
                for _ in range(values[bound] & limit):
                    try:
                        interpret(body, values)
                    except Left as how:
                        if how.args == ("break",):
                            break
                        if how.args == ("return",):
                            raise
            case Jump(kind, condition):
                if holds(condition):
                    raise Left(kind)


class Emitter:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.num_labels = 0

    def label(self) -> str:
        self.num_labels += 1
        return f"L{self.num_labels}"

    def condition(self, condition: Condition) -> None:
        self.lines.append(f"and.b32 %t, %x{condition.left}, {condition.bits}; setp.eq.u32 %p, %t, {condition.value};")

    def block(self, program: list[Statement], leave: str, again: str) -> None:
        for statement in program:
            match statement:
                case Assign(target, operation, left, right):
                    other = right if isinstance(right, str) else f"%x{right}"
                    self.lines.append(f"{operation} %x{target}, %x{left}, {other};")
                case If(condition, then, otherwise):
                    first, behind = self.label(), self.label()
                    self.condition(condition)
                    self.lines.append(f"@%p bra {first};")
                    self.block(otherwise, leave, again)
                    self.lines.append(f"bra {behind}; {first}:")
                    self.block(then, leave, again)
                    self.lines.append(f"{behind}:")
                case Loop(counter, bound, limit, body):
                    head, behind = self.label(), self.label()
                    self.lines.append(f"and.b32 %n{counter}, %x{bound}, {limit}; mov.u32 %c{counter}, 0; {head}:")
                    self.lines.append(f"setp.ge.u32 %p, %c{counter}, %n{counter}; @%p bra {behind};")
                    self.lines.append(f"add.u32 %c{counter}, %c{counter}, 1;")
                    self.block(body, behind, head)
                    self.lines.append(f"bra {head}; {behind}:")
                case Jump(kind, condition):
                    self.condition(condition)
                    target = {"break": leave, "continue": again, "return": "end"}[kind]
                    self.lines.append(f"@%p bra {target};")


def initial(block: int, thread: int) -> list[int]:
    return [thread, block, 6, thread & 3, block * 7 + 1, 5, thread * 3 + block, 0]


@pytest.mark.parametrize("seed", range(40))
def test_random_program(device: PtxDevice, seed: int) -> None:
    program = Generator(seed).block(4, False)
    emitter = Emitter()
    emitter.block(program, "end", "end")
    stores = " ".join(f"st.global.u32 [%d0+{4 * i}], %x{i};" for i in range(NUM_VARIABLES))
    text = f"""{HEADER}
.visible .entry k(.param .u64 out) {{
    .reg .b32 %x<{NUM_VARIABLES}>, %c<99>, %n<99>, %t, %s<4>; .reg .pred %p; .reg .b64 %d<2>;
    mov.u32 %x0, %tid.x; mov.u32 %x1, %ctaid.x; mov.u32 %x2, 6; and.b32 %x3, %x0, 3; mad.lo.u32 %x4, %x1, 7, 1;
    mov.u32 %x5, 5; mad.lo.u32 %x6, %x0, 3, %x1; mov.u32 %x7, 0;
    {chr(10).join(emitter.lines)}
end:
    mov.u32 %s0, %tid.x; mov.u32 %s1, %ctaid.x; mad.lo.u32 %s2, %s1, {BLOCK}, %s0;
    ld.param.u64 %d0, [out]; mad.wide.u32 %d0, %s2, {4 * NUM_VARIABLES}, %d0; {stores}
    ret;
}}"""
    out = device.upload(np.zeros((GRID, BLOCK, NUM_VARIABLES), np.uint32))
    device.execute(device.load(text, name="k"), GRID, BLOCK, [out.pointer])
    want = np.zeros((GRID, BLOCK, NUM_VARIABLES), np.uint32)
    for block in range(GRID):
        for thread in range(BLOCK):
            values = initial(block, thread)
            with contextlib.suppress(Left):
                interpret(program, values)
            want[block, thread] = values
    assert (device.download(out) == want).all()
