"""rms_norm: rows of any length, in place too."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import Norm
from numba_engine.backends.cuda.backend import CudaBackend
from tests.kernels.cuda.conftest import filled, nmse, normal
from tests.reference import ops as reference


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 7), (2, 257), (5, 576), (1, 4096)])
def test_equals_the_reference(backend: CudaBackend, rng: np.random.Generator, rows: int, size: int) -> None:
    x, weight = normal(rng, rows, size), normal(rng, size)
    out = filled(backend, rows, size)
    backend.rms_norm(out, backend.upload(x), Norm(backend.upload(weight), 1e-5))
    assert nmse(backend.download(out), reference.rms_norm(x, weight, 1e-5)) < 1e-12


def test_out_may_be_x(backend: CudaBackend, rng: np.random.Generator) -> None:
    x, weight = normal(rng, 3, 300), normal(rng, 300)
    out = backend.upload(x)
    backend.rms_norm(out, out, Norm(backend.upload(weight), 1e-6))
    assert nmse(backend.download(out), reference.rms_norm(x, weight, 1e-6)) < 1e-12


def test_eps_keeps_zeros_zero(backend: CudaBackend) -> None:
    out = filled(backend, 2, 64)
    zeros = backend.upload(np.zeros((2, 64), np.float32))
    backend.rms_norm(out, zeros, Norm(backend.upload(np.ones(64, np.float32)), 1e-5))
    np.testing.assert_array_equal(backend.download(out), 0)
