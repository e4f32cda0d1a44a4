"""Kernels as values, and their compilation to PTX. Needs no GPU."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import platformdirs
from numba import cuda
from numba.cuda import dispatcher
from numba.cuda.types import void

from numba_engine import formats
from numba_engine.backends.kept_kernels import warn_not_kept

_KERNELS = "numba_engine.backends.cuda.kernels."


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: its Python function, specialised by closure, and the types of its arguments.

    ``name`` is unique and an identifier: the op, and what it is specialised for (``linear_q4_0_x1``).
    """

    name: str
    function: Callable[..., None]
    arguments: tuple[Any, ...]
    threads: int
    """Threads of a block; the kernel is written for exactly this many."""
    min_blocks: int = 1
    """Blocks that must fit a multiprocessor at once: what limits the registers of a thread."""


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
    """Compile for a compute capability such as (9, 0).

    Takes 0.1 to 5 s, so the project's own kernels are kept in the user's cache folder, by all that the PTX depends on.
    """
    stored = _stored(kernel, cc)
    ptx = _read(stored) or _compile(kernel, cc)
    _write(stored, ptx)
    return CompiledKernel(kernel.name, cc, ptx, _entry(ptx))


def _compile(kernel: Kernel, cc: tuple[int, int]) -> str:
    signature = void(*kernel.arguments)
    bounds = (kernel.threads, kernel.min_blocks) if kernel.min_blocks > 1 else None
    with _current_device(cc):
        ptx, _ = cuda.compile(
            kernel.function, signature, device=False, cc=cc, abi="numba", output="ptx", launch_bounds=bounds
        )
    # The environment is numba's own and unused here; the mangled symbol, which also begins the name of every parameter,
    # gives way to the name a profiler should show.
    without_environment = re.sub(r"^\.common \.global .*NumbaEnv.*\n", "", ptx, flags=re.MULTILINE)
    return without_environment.replace(_entry(ptx), kernel.name)


@contextlib.contextmanager
def _current_device(cc: tuple[int, int]) -> Iterator[None]:
    """Device functions that a kernel calls are compiled for the current device, and here there may be none."""
    genuine = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=cc)
    try:
        yield
    finally:
        dispatcher.get_current_device = genuine


def _entry(ptx: str) -> str:
    match = re.search(r"\.entry\s+([\w$]+)", ptx)
    assert match, "numba emits one entry a kernel"
    return match[1]


# ---- the cache folder ------------------------------------------------------------------------------------------------


def _stored(kernel: Kernel, cc: tuple[int, int]) -> Path | None:
    module = kernel.function.__module__
    if not module.startswith(_KERNELS):
        return None  # a test's kernel: its name says nothing about its source
    folder = Path(platformdirs.user_cache_dir("numba-engine")) / "ptx"
    return folder / f"{kernel.name}_sm_{cc[0]}{cc[1]}_{_compiler_and_sources(module)}.ptx"


@cache
def _compiler_and_sources(module: str) -> str:
    """A hash of the compiler's versions, this file, the formats, its own and the kernel files it imports."""
    digest = hashlib.sha256()
    for package in ("numba-cuda", "numba", "llvmlite", "nvidia-nvvm", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            digest.update(f"{package} {importlib.metadata.version(package)}\n".encode())
    folder = Path(__file__).parent / "kernels"
    sources, found = {Path(__file__)}, {folder / f"{module.removeprefix(_KERNELS)}.py"}
    while found:
        source = found.pop()
        sources.add(source)
        imported = re.findall(rf"^from {re.escape(_KERNELS)}(\w+) import", source.read_text(), re.MULTILINE)
        found |= {folder / f"{name}.py" for name in imported} - sources
    sources |= {*Path(formats.__file__).parent.glob("*.py")}  # kernels are made for what they describe
    for source in sorted(sources):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _read(stored: Path | None) -> str | None:
    if stored is None:
        return None
    try:
        return stored.read_text()
    except OSError:
        return None


def _write(stored: Path | None, ptx: str) -> None:
    """Whole or not at all, and not at all where the folder cannot be written."""
    if stored is None or stored.exists():
        return
    partial = stored.with_suffix(f".{os.getpid()}")
    try:
        stored.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(ptx)
        partial.replace(stored)
    except OSError as error:
        warn_not_kept(error)
        with contextlib.suppress(OSError):
            partial.unlink()
