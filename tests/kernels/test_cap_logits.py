from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cpu.backend import CpuBackend
from tests.reference import ops as reference


@pytest.mark.parametrize(("scale", "softcap"), [(0.125, None), (1.0, 30.0), (3.0, 5.5)])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 1), (3, 331), (2, 9001)])
def test_equals_the_reference(
    backend: CpuBackend, rng: np.random.Generator, rows: int, vocab: int, scale: float, softcap: float | None
) -> None:
    logits = rng.standard_normal((rows, vocab), dtype=np.float32) * 20
    expected = reference.cap_logits(logits, scale, softcap)
    backend.cap_logits(logits, scale, softcap)
    np.testing.assert_allclose(logits, expected, rtol=1e-6, atol=1e-5)


def test_far_out_and_not_a_number(backend: CpuBackend) -> None:
    logits = np.array([[-np.inf, -1e30, -1e4, 0, 1e4, 1e30, np.inf, np.nan]], dtype=np.float32)
    backend.cap_logits(logits, 2.0, 30.0)
    np.testing.assert_array_equal(logits[0], [-30, -30, -30, 0, 30, 30, 30, np.nan])
