from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.arrays import KVCacheLayer
from numba_engine.backends.layers import Attention
from numba_engine.config import KVCacheDtype
from tests.kernels.conftest import MakeBackend
from tests.reference import ops as reference


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 16), (80, 8), (6, 32)])
def test_equals_the_reference(
    make_backend: MakeBackend, rng: np.random.Generator, kv_dtype: KVCacheDtype, head_dim: int, block_size: int
) -> None:
    k, v = rng.standard_normal((2, 9, 3, block_size, head_dim)).astype(kv_dtype)
    for num_tokens in (1, 7, 33):
        qkv = rng.standard_normal((num_tokens, 12 * head_dim), dtype=np.float32) * 100
        slots = rng.permutation(9 * block_size)[:num_tokens].astype(np.int32)
        expected = reference.store_kv(k, v, qkv, slots)
        shape = Attention(6, 3, head_dim, head_dim**-0.5)
        make_backend(kv_cache_dtype=kv_dtype).store_kv(KVCacheLayer(k, v), qkv, slots, shape)
        assert np.array_equal(k, expected[0])
        assert np.array_equal(v, expected[1])
