from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from numba_engine.backends.arrays import RopeTable
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.layers import Attention
from tests.reference import ops as reference


@pytest.mark.parametrize("head_dim", [2, 64, 80, 128])
@pytest.mark.parametrize("num_tokens", [1, 7, 33])
def test_equals_the_reference(backend: CpuBackend, rng: np.random.Generator, head_dim: int, num_tokens: int) -> None:
    shape = Attention(6, 2, head_dim, head_dim**-0.5)
    angles = rng.uniform(0, 6, (257, head_dim // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = rng.integers(0, 257, num_tokens).astype(np.int32)
    qkv = rng.standard_normal((num_tokens, 10 * head_dim), dtype=np.float32)
    expected = reference.rope(qkv, positions, cos, sin, 8)
    values = qkv[:, 8 * head_dim :].copy()
    backend.rope(qkv, positions, replace(shape, rope=RopeTable(cos, sin)))
    np.testing.assert_allclose(qkv, expected, rtol=0, atol=1e-6)
    assert np.array_equal(qkv[:, 8 * head_dim :], values)
