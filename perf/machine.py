"""What a result was measured on and with: a number without it is no result."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import psutil

_PACKAGES = (
    *("numba", "numba-cuda", "llvmlite", "numpy", "cupy-cuda12x", "cupy-cuda13x"),
    *("llama-cpp-python", "torch", "transformers"),
)


def describe() -> dict[str, Any]:
    """Machine, versions, commit and date, for a file in ``perf/results``."""
    return {
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": psutil.virtual_memory().total,
            "load_average": os.getloadavg()[0],
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit, with ``+`` where tracked files differ from it; None outside a repository."""
    root = Path(__file__).parents[1]
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=root, capture_output=True, text=True)
    if commit.returncode:
        return None
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=root).returncode
    return commit.stdout.strip() + ("+" if changed else "")
