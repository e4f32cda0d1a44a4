"""``#pragma unroll`` for kernels: loops over ``static_range`` become copies of their body before numba sees them.

A ``cuda.local.array`` lives in registers only if every index is a constant. LLVM unrolls small loops by itself and
gives up on large ones, and then the array goes to local memory (a 4 × 8 tile of sums: 256 bytes of stack, each FMA a
load and a store). So where LLVM gives up, the outer loops are unrolled here. Not the inner ones too: numba takes its
time per statement, and the largest kernel took minutes instead of seconds.
"""

from __future__ import annotations

import ast
import copy
import inspect
import textwrap
from collections.abc import Callable
from typing import Any


def static_range(*bounds: int) -> range:
    """As ``range``, of bounds known when the kernel is made. Only means something in a function under ``@unroll``."""
    return range(*bounds)


def unroll(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its ``static_range`` loops unrolled; bounds may use closure variables and outer indices."""
    return _made(function, _definition(function), _namespace(function))


def unroll_into(kernel: Callable[..., Any], body: Callable[..., Any]) -> Callable[..., Any]:
    """``kernel`` with ``body`` for its body, unrolled: the kernel's return statement says what body's parameters are.

    As if the kernel called the body, inlined. But numba copies what it inlines once a block of it, which took it a
    minute for a body of this size.
    """
    definition, template = _definition(kernel), _definition(body)
    (returned,) = definition.body
    assert isinstance(returned, ast.Return)
    assert isinstance(returned.value, ast.Tuple)
    names: list[ast.expr] = [ast.Name(argument.arg, ast.Store()) for argument in template.args.args]
    definition.body = [ast.Assign([ast.Tuple(names, ast.Store())], returned.value), *template.body]
    return _made(kernel, definition, {**_namespace(kernel), **_namespace(body)})


def _definition(function: Callable[..., Any]) -> ast.FunctionDef:
    lines, first_line = inspect.getsourcelines(function)
    definition = ast.parse(textwrap.dedent("".join(lines))).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    ast.increment_lineno(definition, first_line - 1)
    return definition


def _namespace(function: Callable[..., Any]) -> dict[str, Any]:
    return {**function.__globals__, **inspect.getclosurevars(function).nonlocals}


def _made(function: Callable[..., Any], definition: ast.FunctionDef, namespace: dict[str, Any]) -> Callable[..., Any]:
    tree = _Unroller(namespace).visit(ast.Module([definition], []))
    exec(compile(ast.fix_missing_locations(tree), inspect.getfile(function), "exec"), namespace)
    unrolled: Callable[..., Any] = namespace[function.__name__]
    unrolled.__module__ = function.__module__
    return unrolled


class _Unroller(ast.NodeTransformer):
    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace

    def visit_For(self, node: ast.For) -> Any:
        call = node.iter
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "static_range"):
            return self.generic_visit(node)
        assert isinstance(node.target, ast.Name)
        assert not node.orelse
        indices = eval(compile(ast.Expression(call), "<static_range>", "eval"), self._namespace)
        return [statement for index in indices for statement in self._copy(node, node.target.id, index)]

    def _copy(self, node: ast.For, name: str, index: int) -> list[ast.stmt]:
        body = [_Substitution(name, index).visit(copy.deepcopy(statement)) for statement in node.body]
        unrolled = [self.visit(statement) for statement in body]
        return [one for result in unrolled for one in (result if isinstance(result, list) else [result])]


class _Substitution(ast.NodeTransformer):
    """A loop's index becomes a number, and arithmetic on numbers (``4 * c + r``, ``i % 2``) another one."""

    def __init__(self, name: str, value: int) -> None:
        self._name, self._value = name, value

    def visit_Name(self, node: ast.Name) -> Any:
        return ast.copy_location(ast.Constant(self._value), node) if node.id == self._name else node

    def visit_BinOp(self, node: ast.BinOp) -> Any:
        self.generic_visit(node)
        if isinstance(node.left, ast.Constant) and isinstance(node.right, ast.Constant):
            value = eval(compile(ast.fix_missing_locations(ast.Expression(node)), "<constant>", "eval"), {})
            return ast.copy_location(ast.Constant(value), node)
        return node
