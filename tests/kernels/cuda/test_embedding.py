"""embedding: rows come out of the packed table exactly as stored."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.formats import FORMATS, Format, dequantize, quantize
from tests.kernels.cuda.conftest import filled, normal
from tests.reference import ops as reference


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("hidden", [96, 576, 2176])
def test_rows_are_exact(backend: CudaBackend, rng: np.random.Generator, format: Format, hidden: int) -> None:
    hidden = -(-hidden // format.block_size) * format.block_size
    table = quantize("table", normal(rng, 11, hidden), format)
    token_ids = np.array([10, 0, 3, 3, 9, 6, 5], dtype=np.int32)
    out = filled(backend, len(token_ids), hidden)
    backend.embedding(out, backend.upload(token_ids), backend.load_weight("table", [table]), 1.0)
    expected = dequantize(table)[token_ids]
    if format.minima:  # d * q + m, rounded once here and twice there
        np.testing.assert_allclose(backend.download(out), expected, rtol=1e-6, atol=2e-7)
    else:
        np.testing.assert_array_equal(backend.download(out), expected)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_rows_are_scaled(backend: CudaBackend, rng: np.random.Generator, format: Format) -> None:
    hidden = max(96, format.block_size)
    table = quantize("table", normal(rng, 11, hidden), format)
    token_ids = np.array([10, 0, 7], dtype=np.int32)
    out = filled(backend, 3, hidden)
    backend.embedding(out, backend.upload(token_ids), backend.load_weight("table", [table]), 7.5)
    expected = reference.embedding(token_ids, dequantize(table), 7.5)
    np.testing.assert_allclose(backend.download(out), expected, rtol=1e-6, atol=2e-6)
