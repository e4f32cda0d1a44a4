from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import Norm
from numba_engine.backends.cpu.backend import CpuBackend
from tests.kernels.conftest import MakeBackend
from tests.reference import ops as reference


@pytest.mark.parametrize("size", [1, 7, 33, 257, 576])
def test_equals_the_reference(backend: CpuBackend, rng: np.random.Generator, size: int) -> None:
    weight = rng.standard_normal(size, dtype=np.float32)
    for rows in (1, 7, 33, 257):
        x = rng.standard_normal((rows, size), dtype=np.float32) * 10
        out = np.empty_like(x)
        backend.rms_norm(out, x, Norm(weight, 1e-5))
        np.testing.assert_allclose(out, reference.rms_norm(x, weight, 1e-5), rtol=1e-6, atol=0)


def test_in_place_and_on_any_threads(make_backend: MakeBackend, rng: np.random.Generator) -> None:
    weight = rng.standard_normal(100, dtype=np.float32)
    x = rng.standard_normal((400, 100), dtype=np.float32)
    out = np.empty_like(x)
    make_backend(num_threads=3).rms_norm(out, x, Norm(weight, 1e-6))
    one = make_backend(num_threads=1)
    for row in range(0, 400, 7):
        one.rms_norm(x[row : row + 7], x[row : row + 7], Norm(weight, 1e-6))
    assert np.array_equal(x, out)


def test_epsilon_counts(backend: CpuBackend) -> None:
    out = np.empty((1, 4), dtype=np.float32)
    backend.rms_norm(out, np.full((1, 4), 1e-3, dtype=np.float32), Norm(np.ones(4, dtype=np.float32), 3e-6))
    np.testing.assert_allclose(out, 0.5, rtol=1e-6)
