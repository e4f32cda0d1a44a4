"""store_kv: new keys and values land in their slots, in both cache types, and nothing else moves."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import KVCacheLayer
from numba_engine.backends.layers import Attention
from numba_engine.config import KVCacheDtype
from tests.kernels.cuda.conftest import backend_on, normal
from tests.reference import ops as reference


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(3, 64), (1, 80), (8, 128)])
def test_equals_the_reference(
    device: str, rng: np.random.Generator, kv_dtype: KVCacheDtype, kv_heads: int, head_dim: int
) -> None:
    backend = backend_on(device, kv_dtype)
    shape = Attention(2 * kv_heads, kv_heads, head_dim, head_dim**-0.5)
    k, v = (normal(rng, 4, kv_heads, 16, head_dim).astype(kv_dtype) for _ in range(2))
    qkv = normal(rng, 5, 4 * kv_heads * head_dim)
    slots = np.array([63, 0, 17, 16, -1], dtype=np.int32)
    cache = KVCacheLayer(backend.upload(k), backend.upload(v))
    assert cache.k.dtype == backend.kv_cache_dtype
    backend.store_kv(cache, backend.upload(qkv), backend.upload(slots), shape)
    expected_k, expected_v = reference.store_kv(k, v, qkv[:4], slots[:4])  # the last is padding
    np.testing.assert_array_equal(backend.download(cache.k), expected_k)
    np.testing.assert_array_equal(backend.download(cache.v), expected_v)
