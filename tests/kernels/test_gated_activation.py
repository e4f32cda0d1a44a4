from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.layers import ACTIVATIONS, Activation
from tests.reference import ops as reference


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 7, 33, 257])
def test_equals_the_reference(backend: CpuBackend, rng: np.random.Generator, size: int, activation: Activation) -> None:
    for rows in (1, 7, 33, 257):
        gate_up = rng.standard_normal((rows, 2 * size), dtype=np.float32) * 8
        out = np.empty((rows, size), dtype=np.float32)
        backend.gated_activation(out, gate_up, activation)
        atol = 1e-30 if activation == "silu" else 1e-12  # where 1 + tanh rounds to 0 in float64 already
        rtol = 1e-6 if activation == "silu" else 1e-5  # an error of the exponent grows with its size, up to 88
        np.testing.assert_allclose(out, reference.gated_activation(gate_up, activation), rtol=rtol, atol=atol)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_far_out_and_not_a_number(backend: CpuBackend, activation: Activation) -> None:
    gates = np.array([-1e4, -100, -88, 0, 88, 1e4, np.inf, np.nan], dtype=np.float32)
    out = np.empty((1, 8), dtype=np.float32)
    backend.gated_activation(out, np.concatenate([gates, np.ones(8, dtype=np.float32)])[None], activation)
    np.testing.assert_allclose(out[0], [0, 0, 0, 0, 88, 1e4, np.inf, np.nan], rtol=1e-6, atol=1e-30)
