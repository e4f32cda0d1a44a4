"""add, and linear_norm_add, which is composed with it."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import Norm
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.formats import F32, quantize
from tests.kernels.cuda.conftest import filled, nmse, normal
from tests.reference import ops as reference


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 33), (3, 576)])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_equals_the_reference(
    backend: CudaBackend, rng: np.random.Generator, rows: int, size: int, scale: float
) -> None:
    residual, x = normal(rng, rows, size), normal(rng, rows, size)
    out = backend.upload(residual)
    backend.add(out, backend.upload(x), scale)
    np.testing.assert_allclose(backend.download(out), reference.add(residual, x, scale), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("has_norm", "scale"), [(False, 1.0), (False, 0.22), (True, 3.0)])
def test_linear_norm_add(backend: CudaBackend, rng: np.random.Generator, has_norm: bool, scale: float) -> None:
    residual, x, values, norm = normal(rng, 5, 33), normal(rng, 5, 96), normal(rng, 33, 96), normal(rng, 33)
    weight, out = backend.load_weight("w", [quantize("w", values, F32)]), backend.upload(residual)
    out_norm = Norm(backend.upload(norm), 1e-5) if has_norm else None
    backend.linear_norm_add(out, filled(backend, 5, 33), backend.upload(x), weight, out_norm, scale)
    expected = reference.linear_norm_add(residual, x, values, norm if has_norm else None, 1e-5, scale)
    assert nmse(backend.download(out), expected) < 1e-10
