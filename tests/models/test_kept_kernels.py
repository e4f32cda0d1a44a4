"""Kernels that different processes compiled and kept on disk, used together in one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from pathlib import Path
import numpy as np
from tests.models.cases import CASES, GOLDEN_FILE
from tests.models.test_architectures import logits
from tests.tiny_models import write_hf
for name in sys.argv[2:]:
    with np.load(GOLDEN_FILE) as golden:
        off = np.abs(logits(write_hf(Path(sys.argv[1]) / name, CASES[name])) - golden[name]).max()
    assert off <= 1e-4, f"{name}: off by {off}"
"""


def run(folder: Path, *names: str) -> None:
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), *names],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{names}: exit status {done.returncode}\n{done.stderr[-2000:]}"


def test_kernels_compiled_apart_work_together(tmp_path: Path) -> None:
    """Their symbols are told apart by more than a counter that begins anew in each process."""
    run(
        tmp_path, "llama_gqa1_dim64"
    )  # leaves what all share, so that the next two compile the same number of functions
    differing = ("llama_gqa3_dim64_tied", "llama_gqa4_dim128_llama3_rope")
    for name in differing:
        run(tmp_path, name)
    run(tmp_path, *differing)
