"""rope: q and k heads turn, v stays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from numba_engine.backends.arrays import RopeTable
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.layers import Attention
from tests.kernels.cuda.conftest import nmse, normal
from tests.reference import ops as reference


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (4, 4, 80), (7, 1, 128), (1, 1, 8)])
def test_equals_the_reference(
    backend: CudaBackend, rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int
) -> None:
    shape = Attention(heads, kv_heads, head_dim, head_dim**-0.5)
    angles = np.outer(np.arange(50), 10000.0 ** -(np.arange(0, head_dim, 2) / head_dim))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    positions = np.array([0, 1, 49, 7, 7], dtype=np.int32)
    qkv = normal(rng, 5, (heads + 2 * kv_heads) * head_dim)
    on_device = backend.upload(qkv)
    table = RopeTable(backend.upload(cos), backend.upload(sin))
    backend.rope(on_device, backend.upload(positions), replace(shape, rope=table))
    out = backend.download(on_device)
    assert nmse(out, reference.rope(qkv, positions, cos, sin, heads + kv_heads)) < 1e-13
    np.testing.assert_array_equal(out[:, (heads + kv_heads) * head_dim :], qkv[:, (heads + kv_heads) * head_dim :])
