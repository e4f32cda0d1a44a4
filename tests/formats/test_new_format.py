"""A format that the package does not have: described in this file alone, it runs on the CPU and on the CUDA kernels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from numba_engine.backends import create_backend
from numba_engine.backends.base import Backend
from numba_engine.config import EngineConfig
from numba_engine.formats import Bits, Codes, Format, Scales, StoredTensor, dequantize
from tests.reference import ops as reference

pytestmark = pytest.mark.kernels

TABLE = (-31, -17, -8, -2, 3, 9, 19, 32)
# Blocks of 64: d (float16), 4 fine scales of 6 bits with an offset, then the codes: 2 low bits each, 1 high bit each.
LOW = [Bits(6 + i // 4, 2 * (i % 4), 2) for i in range(64)]
HIGH = [Bits(22 + i % 8, i // 8, 1) for i in range(64)]
TOY = Format(
    "TOY",
    64,
    30,
    codes=Codes(3, tuple(zip(LOW, HIGH, strict=True)), table=TABLE),
    scales=Scales(0, 16, tuple((Bits(2 + i, 1, 6),) for i in range(4)), fine_offset=32),
)
MINIMA = Format(  # runs of 32, minima, codes of 5 bits whose zero is in their middle
    "MINIMA",
    64,
    46,
    codes=Codes(
        5, tuple((Bits(6 + i % 32, 4 * (i // 32), 4), Bits(38 + i // 8, i % 8, 1)) for i in range(64)), zero=16
    ),
    scales=Scales(0, 32, tuple((Bits(4, 4 * i, 4),) for i in range(2))),
    minima=Scales(2, 32, tuple((Bits(5, 4 * i, 4),) for i in range(2)), sign=-1),
)

MakeBackend = Callable[[], Backend]


def stored(format: Format, rows: int, columns: int) -> StoredTensor:
    """Any bytes are a block; d and dmin are finite and small."""
    rng = np.random.default_rng(rows)
    data = rng.integers(0, 256, (rows, columns // 64, format.block_bytes), dtype=np.uint8)
    coarse = rng.uniform(0.001, 0.002, (rows, columns // 64, 2)).astype(np.float16).view(np.uint8)
    data[..., : 4 if format.minima else 2] = coarse[..., : 4 if format.minima else 2]
    return StoredTensor("w", format, (rows, columns), data.reshape(rows, -1))


@pytest.fixture(params=["cpu", "ptx"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return create_backend(EngineConfig(backend=request.param, num_threads=2))


@pytest.mark.parametrize("format", [TOY, MINIMA], ids=lambda f: f.name)
@pytest.mark.parametrize("num_tokens", [1, 5, 33])
def test_linear(backend: Backend, format: Format, num_tokens: int) -> None:
    rng = np.random.default_rng(num_tokens)
    tensor, x = stored(format, 40, 576), rng.standard_normal((num_tokens, 576), dtype=np.float32)
    out = backend.empty((num_tokens, 40), np.dtype(np.float32))
    backend.linear(out, backend.upload(x), backend.load_weight("w", [tensor]))
    expected = reference.linear(x, dequantize(tensor))
    error = backend.download(out).astype(np.float64) - expected
    assert (error**2).mean() < 1e-8 * (expected**2).mean(), "activations have 16 bits"


@pytest.mark.parametrize("format", [TOY, MINIMA], ids=lambda f: f.name)
def test_embedding(backend: Backend, format: Format) -> None:
    table, ids = stored(format, 37, 128), np.array([36, 0, 17], np.int32)
    out = backend.empty((3, 128), np.dtype(np.float32))
    backend.embedding(out, backend.upload(ids), backend.load_weight("w", [table]), 1.0)
    np.testing.assert_allclose(backend.download(out), dequantize(table)[ids], rtol=1e-6, atol=1e-6)


def test_the_table_is_looked_up_and_scales_have_their_offset() -> None:
    tensor = stored(TOY, 3, 64)
    block = tensor.data[1]
    d = float(block[:2].view(np.float16)[0])
    code = (block[6 + 17 // 4] >> 2 * (17 % 4) & 3) | (block[22 + 17 % 8] >> 17 // 8 & 1) << 2
    assert dequantize(tensor)[1, 17] == np.float32(d * ((block[2 + 1] >> 1 & 63) - 32.0)) * TABLE[code]
