"""The PTX assembler of the ``nvidia-cuda-nvcc`` wheel: machine code, and what it says of registers and spills."""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from numba_engine.backends.cuda.compiler import CompiledKernel
from numba_engine.errors import BackendUnavailableError


@dataclass(frozen=True, slots=True)
class Assembled:
    """Machine code of one kernel and ``ptxas -v``'s account of it, in bytes and registers per thread."""

    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    barriers: int


@cache
def find_ptxas() -> str | None:
    """The wheel's ptxas, which is as new as the compiler; else the one on PATH."""
    site_packages = Path(sysconfig.get_paths()["purelib"])
    in_wheels = sorted(site_packages.glob("nvidia/**/bin/ptxas"), reverse=True)
    return str(in_wheels[0]) if in_wheels else shutil.which("ptxas")


@cache
def assemble(compiled: CompiledKernel, *, line_info: bool = False) -> Assembled:
    """Machine code; with ``line_info`` it says which line of the PTX each instruction came from.

    Raises BackendUnavailableError without ptxas, or if it rejects the PTX (a compiler newer than the assembler).
    """
    ptxas = find_ptxas()
    if ptxas is None:
        raise BackendUnavailableError("ptxas was not found: pip install nvidia-cuda-nvcc")
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(compiled.ptx)
        major, minor = compiled.cc
        command = [ptxas, "-v", f"-arch=sm_{major}{minor}", "-o", str(target), str(source)]
        command += ["-lineinfo"] if line_info else []
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise BackendUnavailableError(f"{ptxas} rejects kernel {compiled.name}: {done.stderr.strip()[:500]}")
        return _parse(done.stderr + done.stdout, target.read_bytes())


def _parse(report: str, cubin: bytes) -> Assembled:
    def number(pattern: str) -> int:
        return sum(int(found) for found in re.findall(pattern, report))

    assert "registers" in report, report
    return Assembled(
        cubin,
        registers=number(r"Used (\d+) registers"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_bytes=number(r"(\d+) bytes smem"),
        barriers=number(r"used (\d+) barriers"),
    )
