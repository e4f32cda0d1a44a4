"""head_norm: every q and k head by itself, v untouched."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import Norm
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.layers import Attention
from tests.kernels.cuda.conftest import nmse, normal
from tests.reference import ops as reference


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (5, 1, 80), (4, 2, 128)])
def test_equals_the_reference(
    backend: CudaBackend, rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int
) -> None:
    shape = Attention(heads, kv_heads, head_dim, head_dim**-0.5)
    qkv, q_norm, k_norm = (
        normal(rng, 3, (heads + 2 * kv_heads) * head_dim),
        normal(rng, head_dim),
        normal(rng, head_dim),
    )
    on_device = backend.upload(qkv)
    norms = (Norm(backend.upload(weight), 1e-6) for weight in (q_norm, k_norm))
    backend.head_norm(on_device, *norms, shape)
    out = backend.download(on_device)
    assert nmse(out, reference.head_norm(qkv, q_norm, k_norm, heads, kv_heads, 1e-6)) < 1e-12
    np.testing.assert_array_equal(out[:, (heads + kv_heads) * head_dim :], qkv[:, (heads + kv_heads) * head_dim :])
