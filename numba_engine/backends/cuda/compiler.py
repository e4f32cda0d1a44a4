"""Kernels as values, and their compilation to PTX. Needs no GPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda
from numba.cuda.types import void


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: its Python function, specialised by closure, and the types of its arguments.

    ``name`` is unique: the op, and what it is specialised for (``linear_q4_0_x1``).
    """

    name: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    threads: int
    """Threads of a block; the kernel is written for exactly this many."""


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """PTX of one kernel for one compute capability."""

    name: str
    cc: tuple[int, int]
    ptx: str
    entry: str
    """The kernel's symbol in the PTX."""


@cache
def compile_kernel(kernel: Kernel, cc: tuple[int, int]) -> CompiledKernel:
    """Compile for a compute capability such as (9, 0). About 0.1 s, kept for the life of the process."""
    signature = void(*kernel.arguments)
    ptx, _ = cuda.compile(kernel.function, signature, device=False, cc=cc, abi="numba", output="ptx")
    return CompiledKernel(kernel.name, cc, ptx, _entry(ptx))


def _entry(ptx: str) -> str:
    match = re.search(r"\.entry\s+([\w$]+)", ptx)
    assert match, "numba emits one entry a kernel"
    return match[1]
