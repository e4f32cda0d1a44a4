"""gated_activation, including gates whose exponential overflows."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.layers import ACTIVATIONS, Activation
from tests.kernels.cuda.conftest import filled, nmse, normal
from tests.reference import ops as reference


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (7, 33), (3, 257), (2, 1536)])
def test_equals_the_reference(
    backend: CudaBackend, rng: np.random.Generator, rows: int, size: int, activation: Activation
) -> None:
    gate_up = normal(rng, rows, 2 * size) * np.float32(4)
    out = filled(backend, rows, size)
    backend.gated_activation(out, backend.upload(gate_up), activation)
    assert nmse(backend.download(out), reference.gated_activation(gate_up, activation)) < 1e-12


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_extreme_gates(backend: CudaBackend, activation: Activation) -> None:
    gate_up = np.array([[-1000.0, -90.0, 0.0, 90.0, 1000.0, 1.0, 1.0, 1.0, 1.0, 1.0]], dtype=np.float32)
    out = filled(backend, 1, 5)
    backend.gated_activation(out, backend.upload(gate_up), activation)
    np.testing.assert_allclose(backend.download(out), [[0, 0, 0, 90, 1000]], atol=1e-35)
