"""The beginning of the next weight is asked for: which one that is, and that nothing beyond its end is."""

from __future__ import annotations

import gc

import numpy as np

from numba_engine.backends.arrays import Array, Weight
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.kernels import streaming
from numba_engine.backends.cuda.weight_order import WeightOrder
from numba_engine.formats import Q4_1, quantize
from tests.kernels.cuda.conftest import backend_on, filled, normal


def weight(backend: CudaBackend, rows: int) -> Weight:
    return backend.load_weight("w", [quantize("w", normal(np.random.default_rng(0), rows, 64), Q4_1)])


def test_the_order_of_the_first_pass_is_kept() -> None:
    backend, order = backend_on("ptx"), WeightOrder()
    first, second, third = weights = [weight(backend, rows) for rows in (8, 16, 24)]
    assert [order.use(w) for w in weights] == [None] * 3
    assert order.use(first) is second.segments[0].data
    assert order.use(third) is first.segments[0].data  # the pass before went on with the first one
    assert order.use(second) is third.segments[0].data


def test_a_weight_that_is_gone_is_not_asked_for() -> None:
    backend, order = backend_on("ptx"), WeightOrder()
    weights = [weight(backend, rows) for rows in (8, 16)]
    for w in weights:
        order.use(w)
    del w, weights[1]
    gc.collect()
    assert order.use(weights[0]) is None


def test_at_most_the_weight_itself_is_asked_for() -> None:
    backend = backend_on("ptx")
    small, large = (backend.empty((size,), np.dtype(np.uint32)) for size in (100, 2 << 20))
    assert streaming.ahead_of(small, large, 1) == (small, 3)
    assert streaming.ahead_of(large, small, 1) == (large, streaming.AHEAD_BYTES // 128)
    assert streaming.ahead_of(large, small, streaming.TOKENS[-1] + 1) == (small, 0)
    assert streaming.ahead_of(None, small, 1) == (small, 0)


def test_a_chain_of_products_asks_within_bounds() -> None:
    """The executor refuses to fetch what is not part of an array."""
    backend = backend_on("ptx")
    chain = [weight(backend, rows) for rows in (33, 64, 7)]
    x = backend.upload(normal(np.random.default_rng(1), 3, 64))
    results = [[backend.download(product(backend, x, w)) for w in chain] for _ in range(2)]
    for once, again in zip(*results, strict=True):
        np.testing.assert_array_equal(once, again)


def product(backend: CudaBackend, x: Array, w: Weight) -> Array:
    out = filled(backend, 3, w.shape[0])
    backend.linear(out, x, w)
    return out
