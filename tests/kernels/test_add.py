from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cpu.backend import CpuBackend
from tests.reference import ops as reference


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 33), (3, 576)])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_equals_the_reference(
    backend: CpuBackend, rng: np.random.Generator, rows: int, size: int, scale: float
) -> None:
    residual, x = rng.standard_normal((2, rows, size), dtype=np.float32)
    expected = reference.add(residual, x, scale)
    backend.add(residual, x, scale)
    np.testing.assert_allclose(residual, expected, rtol=0, atol=1e-6)
