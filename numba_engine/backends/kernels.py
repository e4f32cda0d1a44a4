"""Kernels: a backend's kernels, found by the name of their op.

The kernel of an op is the module ``<package>.<op's name>``: ``launch(backend, *the op's arguments)`` runs it. That of a
fused op may also define ``supports(backend, *the op's arguments)``: False where the op must be composed.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Any

from numba_engine.backends.base import Backend
from numba_engine.backends.ops import Op


class Kernels:
    """Those in one package, imported when their op first runs. Without ``fusion`` only those of unfused ops count."""

    def __init__(self, package: str, *, fusion: bool) -> None:
        self._package = package
        self._fusion = fusion
        self._modules: dict[str, ModuleType | None] = {}

    def has(self, op: Op) -> bool:
        return self._module(op) is not None

    def run(self, backend: Backend, op: Op, args: tuple[Any, ...]) -> Any:
        """Launch the op's kernel; compose a fused op that has none, or none that supports the arguments."""
        module = self._module(op)
        if module is None or (hasattr(module, "supports") and not module.supports(backend, *args)):
            return op.compose(backend, *args)
        return module.launch(backend, *args)

    def _module(self, op: Op) -> ModuleType | None:
        if op.name not in self._modules:
            self._modules[op.name] = self._imported(op)
        return self._modules[op.name]

    def _imported(self, op: Op) -> ModuleType | None:
        name = f"{self._package}.{op.name}"
        if op.is_fused and not (self._fusion and importlib.util.find_spec(name)):
            return None
        return importlib.import_module(name)
