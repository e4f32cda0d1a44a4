from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import Norm
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.layers import Attention
from tests.reference import ops as reference


@pytest.mark.parametrize("head_dim", [24, 80, 128])
def test_equals_the_reference(backend: CpuBackend, rng: np.random.Generator, head_dim: int) -> None:
    q_norm, k_norm = rng.standard_normal((2, head_dim), dtype=np.float32)
    for num_tokens in (1, 7, 33):
        qkv = rng.standard_normal((num_tokens, 10 * head_dim), dtype=np.float32)
        expected = reference.head_norm(qkv, q_norm, k_norm, 6, 2, 1e-6)
        backend.head_norm(qkv, Norm(q_norm, 1e-6), Norm(k_norm, 1e-6), Attention(6, 2, head_dim, head_dim**-0.5))
        np.testing.assert_allclose(qkv, expected, rtol=1e-6, atol=1e-7)
