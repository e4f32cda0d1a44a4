"""Kernels: a backend's kernels, found by the name of their op.

The kernel of an op is the module ``<package>.<op's name>``: ``launch(backend, *the op's arguments)`` runs it. That of a
fused op may also define ``supports(backend, *the op's arguments)``: False where the op must be composed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from numba_engine.backends.base import Backend
from numba_engine.backends.ops import Op


class Kernels:
    """Those in one package, imported when their op first runs. Without ``fusion`` only those of unfused ops count."""

    def __init__(self, package: str, *, fusion: bool) -> None:
        self._package = package
        self._fusion = fusion
        self._launches: dict[Op, Callable[..., Any]] = {}

    def has(self, op: Op) -> bool:
        name = f"{self._package}.{op.name}"
        return not op.is_fused or (self._fusion and importlib.util.find_spec(name) is not None)

    def run(self, backend: Backend, op: Op, args: tuple[Any, ...]) -> Any:
        """Launch the op's kernel; compose a fused op that has none, or none that supports the arguments."""
        launch = self._launches.get(op)
        if launch is None:
            launch = self._launches[op] = self._launch(op)
        return launch(backend, *args)

    def _launch(self, op: Op) -> Callable[..., Any]:
        if not self.has(op):
            return op.compose
        module = importlib.import_module(f"{self._package}.{op.name}")
        supports, launch = getattr(module, "supports", None), module.launch
        if supports is None:
            return launch
        return lambda backend, *args: (launch if supports(backend, *args) else op.compose)(backend, *args)
