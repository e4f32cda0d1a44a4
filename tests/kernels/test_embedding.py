from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.formats import FORMATS, Format, dequantize, quantize
from tests.reference import ops as reference


@pytest.mark.parametrize("format", list(FORMATS.values()), ids=lambda f: f.name)
def test_equals_the_reference(backend: CpuBackend, rng: np.random.Generator, format: Format) -> None:
    for vocab, hidden in ((257, 96), (7, 32)) if format.is_quantized else ((257, 33), (1, 1)):
        hidden = -(-hidden // format.block_size) * format.block_size
        tensor = quantize("embed", rng.standard_normal((vocab, hidden), dtype=np.float32), format)
        table = backend.load_weight("embed", [tensor])
        for num_tokens in (1, 33):
            token_ids = rng.integers(0, vocab, num_tokens).astype(np.int32)
            token_ids[-1] = vocab - 1
            out = np.empty((num_tokens, hidden), dtype=np.float32)
            backend.embedding(out, token_ids, table, 1.0)
            assert np.array_equal(out, reference.embedding(token_ids, dequantize(tensor)))
            backend.embedding(out, token_ids, table, 7.5)
            np.testing.assert_allclose(out, reference.embedding(token_ids, dequantize(tensor), 7.5), rtol=1e-7)
