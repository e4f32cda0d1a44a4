"""linear_norm_add: every composition of norm and scale, and that a plain one is linear_add to the bit."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import Norm
from numba_engine.formats import F32, quantize
from tests.kernels.conftest import MakeBackend
from tests.reference import ops as reference


@pytest.mark.parametrize("rows", [1, 19])
@pytest.mark.parametrize(("has_norm", "scale"), [(False, 1.0), (False, 0.22), (True, 1.0), (True, 3.0)])
def test_equals_the_reference(
    make_backend: MakeBackend, rng: np.random.Generator, rows: int, has_norm: bool, scale: float
) -> None:
    backend = make_backend("float32")
    x, values = (rng.standard_normal((n, 96), dtype=np.float32) for n in (rows, 33))
    norm = Norm(rng.standard_normal(33, dtype=np.float32), 1e-5) if has_norm else None
    weight = backend.load_weight("w", [quantize("w", values, F32)])
    residual = rng.standard_normal((rows, 33), dtype=np.float32)
    added = residual.copy()
    expected = reference.linear_norm_add(residual, x, values, None if norm is None else norm.weight, 1e-5, scale)
    backend.linear_norm_add(residual, np.full_like(residual, np.nan), x, weight, norm, scale)
    np.testing.assert_allclose(residual, expected, rtol=0, atol=2e-5)
    if not has_norm and scale == 1.0:
        backend.linear_add(added, x, weight)
        assert np.array_equal(residual, added)
