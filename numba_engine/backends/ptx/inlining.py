"""Calls made away with: the bodies of callees stand where they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from numba_engine.backends.ptx.errors import ErrorKind, PtxError
from numba_engine.backends.ptx.operands import CARRY, is_sync
from numba_engine.backends.ptx.parser import (
    Address,
    Function,
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

_MAX_INLINE_DEPTH = 32


class Flattener:
    """Copies function bodies into one, with every register, label and variable of a callee made unique."""

    def __init__(self, module: Module, name: str) -> None:
        self.module = module
        self.name = name
        self.registers: dict[str, str] = {CARRY: "pred"}
        self.variables: dict[str, Variable] = {}
        self.branch_targets: dict[str, tuple[str, ...]] = {}
        self.body: list[Instruction | Label] = []
        self.count = 0

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

    def skip_unless_guarded(self, instruction: Instruction, emit: Callable[[Instruction], None]) -> None:
        """``@p op`` → a branch around op, so that op itself stands unguarded."""
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
