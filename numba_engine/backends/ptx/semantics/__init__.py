"""What each opcode does, by kind. Importing this package registers all of them."""

from numba_engine.backends.ptx.semantics import (
    async_copy,
    atomics,
    compare,
    convert,
    floating,
    half,
    hints,
    integer,
    load_store,
    matrix,
    move,
    warp,
)
from numba_engine.backends.ptx.semantics.registry import known_opcodes

__all__ = [
    "async_copy",
    "atomics",
    "compare",
    "convert",
    "floating",
    "half",
    "hints",
    "integer",
    "known_opcodes",
    "load_store",
    "matrix",
    "move",
    "warp",
]
