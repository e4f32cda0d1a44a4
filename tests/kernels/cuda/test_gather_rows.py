"""gather_rows copies the rows asked for, in order, and no other."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cuda.backend import CudaBackend
from tests.kernels.cuda.conftest import filled, normal


@pytest.mark.parametrize("size", [1, 33, 257, 576])
def test_copies_rows(backend: CudaBackend, rng: np.random.Generator, size: int) -> None:
    x, rows = normal(rng, 9, size), np.array([0, 8, 8, 4], dtype=np.int32)
    out = filled(backend, 4, size)
    backend.gather_rows(out, backend.upload(x), backend.upload(rows))
    np.testing.assert_array_equal(backend.download(out), x[rows])
