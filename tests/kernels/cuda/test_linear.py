"""linear and linear_add: every format, awkward shapes, stacked segments, and the same bits in any batch."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from numba_engine import formats
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.kernels.packing import pack
from numba_engine.backends.ptx import PtxDevice
from numba_engine.config import EngineConfig
from numba_engine.errors import BackendUnavailableError
from numba_engine.formats import (
    BF16,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q6_K,
    Q8_0,
    Format,
    StoredTensor,
    dequantize,
    quantize,
)
from tests.kernels.cuda.conftest import filled, nmse, normal
from tests.reference import ops as reference

FORMATS = list(formats.FORMATS.values())
NUM_TOKENS = [(f, n) for f in FORMATS for n in ((1, 3, 7, 13) if f in (BF16, Q4_1) else (1, 7))]
"""1, 3, 7 and 13 rows are kernels of their own. They differ alike in every format, so two formats try all of them."""
NMSE = {BF16: 2e-11, F16: 1e-12}
"""x in two planes of bfloat16 keeps 17 of its bits, in two of half 22; and float32 sums."""
WIDENED = {Q4_K: Fraction(640, 576), Q6_K: Fraction(864, 840)}
"""Bytes on the device for one in the file: coarse scales stand in each unit, fine ones of 6 bits are bytes."""
SHAPES = [(1, 32), (7, 96), (33, 576), (257, 160), (12, 4352)]  # out_features, in_features
FLOAT_SHAPES = [(1, 4), (7, 36), (33, 260), (257, 64), (12, 4100)]


def whole_blocks(format: Format, columns: int) -> int:
    return -(-columns // format.block_size) * format.block_size


def matrix(rng: np.random.Generator, format: Format, rows: int, columns: int) -> StoredTensor:
    return quantize("w", normal(rng, rows, columns), format)


def run(backend: CudaBackend, tensors: list[StoredTensor], x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    weight = backend.load_weight("w", tensors)
    out = filled(backend, len(x), weight.shape[0])
    backend.linear(out, backend.upload(x), weight, None if bias is None else backend.upload(bias))
    return backend.download(out)


@pytest.mark.parametrize(("format", "num_tokens"), NUM_TOKENS, ids=lambda p: getattr(p, "label", p))
def test_equals_the_reference(backend: CudaBackend, rng: np.random.Generator, format: Format, num_tokens: int) -> None:
    for rows, least_columns in SHAPES if format.is_quantized else FLOAT_SHAPES:
        columns = whole_blocks(format, least_columns)
        tensor, x, bias = matrix(rng, format, rows, columns), normal(rng, num_tokens, columns), normal(rng, rows)
        linear = reference.linear_int8 if format.is_quantized else reference.linear
        expected = linear(x, dequantize(tensor), bias)
        assert nmse(run(backend, [tensor], x, bias), expected) < NMSE.get(format, 1e-12)


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_a_row_is_the_same_bits_in_any_batch(backend: CudaBackend, rng: np.random.Generator, format: Format) -> None:
    tensor, x = matrix(rng, format, 33, 4352), normal(rng, 33, 4352)
    together = run(backend, [tensor], x)
    smaller = [slice(5, 7), slice(11, 23)] if (format, 3) in NUM_TOKENS else []
    for rows in (slice(0, 1), slice(9, 16), *smaller):
        np.testing.assert_array_equal(run(backend, [tensor], x[rows]), together[rows])


@pytest.mark.parametrize("format", [BF16, Q4_1, Q6_K], ids=lambda f: f.name)
def test_many_rows_equal_the_reference_and_few(backend: CudaBackend, rng: np.random.Generator, format: Format) -> None:
    """The GEMM: rows and outputs that fill no tile, fewer units of columns than slices, and more."""
    for num_tokens, rows, least_columns in [(33, 40, 96), (64, 33, 1120), (130, 7, 64)]:
        columns = whole_blocks(format, least_columns)
        tensor, x, bias = matrix(rng, format, rows, columns), normal(rng, num_tokens, columns), normal(rng, rows)
        linear = reference.linear_int8 if format.is_quantized else reference.linear
        out = run(backend, [tensor], x, bias)
        assert nmse(out, linear(x, dequantize(tensor), bias)) < NMSE.get(format, 1e-12)
        np.testing.assert_array_equal(out[-16:], run(backend, [tensor], x[-16:], bias))


@pytest.mark.parametrize("format", [BF16, Q4_1], ids=lambda f: f.name)
def test_the_gemm_meets_no_bank_twice_and_reads_weights_once_a_block(rng: np.random.Generator, format: Format) -> None:
    device = PtxDevice(counting=True)
    backend = CudaBackend(device, EngineConfig(), name="ptx")
    weight = backend.load_weight("w", [matrix(rng, format, 128, 256)])
    backend.linear(filled(backend, 64, 128), backend.upload(normal(rng, 64, 256)), weight)
    stage, gemm = device.launches
    assert (stage.kernel, gemm.kernel) == (f"gemm_stage_{format.name.lower()}", f"gemm_{format.name.lower()}")
    assert gemm.shared_wavefronts == gemm.shared_wavefronts_ideal
    assert stage.shared_wavefronts <= 1.02 * stage.shared_wavefronts_ideal
    assert gemm.arrays["w"].load.bytes_by_width[16] >= 0.8 * gemm.arrays["w"].load.bytes
    assert gemm.arrays["w"].distinct_bytes_read == gemm.arrays["w"].nbytes


@pytest.mark.parametrize("format", [f for f in FORMATS if f.is_quantized], ids=lambda f: f.name)
def test_integers_are_exact(backend: CudaBackend, format: Format) -> None:
    """With one column of x at 1 and all others 0, an output is one weight, rounded once."""
    rng = np.random.default_rng(1)
    size = whole_blocks(format, 128)
    tensor = matrix(rng, format, 5, size)
    expected = dequantize(tensor)
    columns = [0, 31, 32, 77, 127]
    out = run(backend, [tensor], np.eye(size, dtype=np.float32)[columns])
    atol = 5e-7 if format is Q4_K else 2e-7  # its scaled codes and minima, of up to 2, nearly cancel
    np.testing.assert_allclose(out, expected[:, columns].T, rtol=3e-7, atol=atol)


def test_linear_add_adds_and_parts_of_other_formats_stack(backend: CudaBackend, rng: np.random.Generator) -> None:
    formats = (Q4_1, Q8_0, Q8_0, F16)
    tensors = [matrix(rng, format, rows, 64) for format, rows in zip(formats, (5, 3, 8, 9), strict=True)]
    x, residual = normal(rng, 5, 64), normal(rng, 5, 25)
    weight = backend.load_weight("w", tensors)
    assert [segment.num_rows for segment in weight.segments] == [5, 11, 9]
    out = backend.upload(residual)
    backend.linear_add(out, backend.upload(x), weight)
    expected = residual + reference.linear(x, np.concatenate([dequantize(tensor) for tensor in tensors]))
    assert nmse(backend.download(out), expected) < 1e-9  # x in 16 bits


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_packing_keeps_every_byte_and_pads_only_odd_shapes(format: Format) -> None:
    rng = np.random.default_rng(0)
    tensor = matrix(rng, format, 32, 4096)
    packed = pack(format, tensor.data, 4096)
    assert packed.nbytes == tensor.nbytes * WIDENED.get(format, 1)
    if format.block_size == 1 or format is Q8_0:  # nibbles find other neighbours
        assert np.array_equal(np.sort(packed.view(np.uint8)), np.sort(tensor.data.reshape(-1)))
    assert pack(format, tensor.data[:1], 4096).nbytes == packed.nbytes // (32 if format is F32 else 1)


@pytest.mark.parametrize("format", [f for f in FORMATS if f is not F32], ids=lambda f: f.name)
def test_a_token_of_any_size_is_as_exact(backend: CudaBackend, rng: np.random.Generator, format: Format) -> None:
    columns = whole_blocks(format, 96)
    tensor, x = matrix(rng, format, 20, columns), normal(rng, 7, columns)
    x *= np.array([1e-30, 1e-9, 1e-3, 1, 1e4, 1e9, 1e30], dtype=np.float32)[:, None]
    out, expected = run(backend, [tensor], x), reference.linear(x, dequantize(tensor))
    assert [nmse(a, b) < 2e-9 for a, b in zip(out, expected, strict=True)] == [True] * 7


@pytest.mark.parametrize("format", FORMATS, ids=lambda f: f.name)
def test_not_a_number_stays_in_its_row(backend: CudaBackend, rng: np.random.Generator, format: Format) -> None:
    columns = whole_blocks(format, 64)
    x = normal(rng, 7, columns)
    x[2, 40], x[4, 3], x[5] = np.nan, np.inf, 0
    out = run(backend, [matrix(rng, format, 20, columns)], x)
    assert not np.isfinite(out[[2, 4]]).any()
    assert np.isfinite(np.delete(out, [2, 4], axis=0)).all()
    assert np.array_equal(out[5], np.zeros(20))


@pytest.mark.parametrize("format", [Q4_0, Q8_0], ids=lambda f: f.name)
def test_extreme_integers_do_not_overflow(backend: CudaBackend, format: Format) -> None:
    weight = np.full((16, 4096), -1, dtype=np.float32)
    weight[:, ::2] = 1
    tensor = quantize("w", weight, format)
    x = np.sign(dequantize(tensor)[:1])
    np.testing.assert_allclose(run(backend, [tensor], x), reference.linear(x, dequantize(tensor)), rtol=1e-6)


def test_columns_that_are_no_multiple_of_4_are_refused(backend: CudaBackend, rng: np.random.Generator) -> None:
    with pytest.raises(BackendUnavailableError, match="33 columns"):
        backend.load_weight("w", [matrix(rng, F32, 4, 33)])
