"""The shapes of Llama-3-8B, on a GPU only: the executor would take minutes."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.layers import Attention
from numba_engine.formats import FORMATS, Format, dequantize, quantize
from tests.kernels.cuda.conftest import backend_on, filled, nmse, normal
from tests.kernels.cuda.test_attention import Case
from tests.reference import ops as reference

pytestmark = pytest.mark.cuda


@pytest.mark.parametrize(("rows", "columns"), [(6144, 4096), (1024, 14336)])
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda f: f.name)
def test_linear(rng: np.random.Generator, format: Format, rows: int, columns: int) -> None:
    backend = backend_on("cuda")
    tensor = quantize("w", normal(rng, rows, columns), format)
    weight, x = backend.load_weight("w", [tensor]), normal(rng, 33, columns)
    expected = reference.linear(x, dequantize(tensor))
    for num_rows in (1, 2, 4, 8, 33):
        out = filled(backend, num_rows, rows)
        backend.linear(out, backend.upload(x[:num_rows]), weight)
        assert nmse(backend.download(out), expected[:num_rows]) < 1e-11


@pytest.mark.parametrize("sequences", [[(1, 4000), (1, 17)], [(64, 700)]], ids=["decode", "prefill"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_attention(rng: np.random.Generator, kv_dtype: str, sequences: list[tuple[int, int]]) -> None:
    case = Case(rng, Attention(32, 8, 128, 128**-0.5), sequences, kv_dtype)
    backend = backend_on("cuda", "float16" if kv_dtype == "float16" else "float32")
    assert nmse(case.run(backend), case.expected()) < 1e-11
