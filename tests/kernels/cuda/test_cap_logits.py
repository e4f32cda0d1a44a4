"""cap_logits, including logits whose exponential overflows."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cuda.backend import CudaBackend
from tests.kernels.cuda.conftest import normal
from tests.reference import ops as reference


@pytest.mark.parametrize(("scale", "softcap"), [(0.125, None), (1.0, 30.0), (3.0, 5.5)])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 331)])
def test_equals_the_reference(
    backend: CudaBackend, rng: np.random.Generator, rows: int, vocab: int, scale: float, softcap: float | None
) -> None:
    logits = normal(rng, rows, vocab) * np.float32(20)
    out = backend.upload(logits)
    backend.cap_logits(out, scale, softcap)
    expected = reference.cap_logits(logits, scale, softcap)
    np.testing.assert_allclose(backend.download(out), expected, rtol=1e-6, atol=1e-5)


def test_extreme_logits(backend: CudaBackend) -> None:
    out = backend.upload(np.array([[-np.inf, -1e30, -1e4, 0, 1e4, 1e30, np.inf]], dtype=np.float32))
    backend.cap_logits(out, 2.0, 30.0)
    np.testing.assert_array_equal(backend.download(out)[0], [-30, -30, -30, 0, 30, 30, 30])
