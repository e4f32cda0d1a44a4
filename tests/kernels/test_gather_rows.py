from __future__ import annotations

import numpy as np

from numba_engine.backends.cpu.backend import CpuBackend
from tests.reference import ops as reference


def test_equals_the_reference(backend: CpuBackend, rng: np.random.Generator) -> None:
    x = rng.standard_normal((33, 57), dtype=np.float32)
    rows = np.array([0, 5, 5, 32, 1], dtype=np.int32)
    out = np.empty((5, 57), dtype=np.float32)
    backend.gather_rows(out, x, rows)
    assert np.array_equal(out, reference.gather_rows(x, rows))
