from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cpu.backend import CpuBackend
from tests.reference import ops as reference


@pytest.mark.parametrize("size", [1, 7, 33, 257])
def test_equals_the_reference(backend: CpuBackend, rng: np.random.Generator, size: int) -> None:
    for rows in (1, 7, 33, 257):
        gate_up = rng.standard_normal((rows, 2 * size), dtype=np.float32) * 8
        out = np.empty((rows, size), dtype=np.float32)
        backend.gated_activation(out, gate_up, "silu")
        np.testing.assert_allclose(out, reference.gated_activation(gate_up), rtol=1e-6, atol=1e-30)


def test_far_out_and_not_a_number(backend: CpuBackend) -> None:
    gates = np.array([-1e4, -100, -88, 0, 88, 1e4, np.inf, np.nan], dtype=np.float32)
    out = np.empty((1, 8), dtype=np.float32)
    backend.gated_activation(out, np.concatenate([gates, np.ones(8, dtype=np.float32)])[None], "silu")
    np.testing.assert_allclose(out[0], [0, 0, 0, 0, 88, 1e4, np.inf, np.nan], rtol=1e-6, atol=1e-30)
