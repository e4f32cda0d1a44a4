"""Storage formats against the gguf package's own quantisers, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from numba_engine.storage import StorageFormat, StoredTensor, dequantize, is_finite, quantize

QUANTIZED = (StorageFormat.Q8_0, StorageFormat.Q4_0, StorageFormat.Q4_1)
EVERY_FORMAT = pytest.mark.parametrize("format", list(StorageFormat), ids=lambda format: format.label)


def ggml_type(format: StorageFormat) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[format.label]


def awkward_values(rows: int, columns: int) -> np.ndarray:
    """Rows of very different scale, some constant, some zero, some with ties in magnitude and exact halves."""
    rng = np.random.default_rng(rows * 1000 + columns)
    values = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-6, 4, size=(rows, 1))
    values[0] = 0
    values[1] = 1.25
    values[2] = np.where(np.arange(columns) % 2, 3.5, -3.5)
    values[3] = np.arange(columns) % 32 - 15.5
    values[4, :32] = np.arange(32) * 127 / 254 - 4  # halves of the int8 step: rounding away from zero shows
    values[4, 0] = 127.0
    return values.astype(np.float32)


@EVERY_FORMAT
@pytest.mark.parametrize("shape", [(7, 32), (33, 96), (5, 288)])
def test_quantize_and_dequantize_equal_ggml_bit_for_bit(format: StorageFormat, shape: tuple[int, int]) -> None:
    values = awkward_values(*shape)
    with np.errstate(over="ignore"):
        ours = quantize("w", values, format)
        theirs = gguf.quants.quantize(values, ggml_type(format)).view(np.uint8).reshape(shape[0], -1)
    assert np.array_equal(ours.data, theirs)
    assert (ours.shape, ours.data.shape) == (shape, (shape[0], format.row_bytes(shape[1])))
    back = gguf.quants.dequantize(theirs, ggml_type(format)).reshape(shape)
    assert dequantize(ours).dtype == np.float32
    assert np.array_equal(dequantize(ours).view(np.uint32), back.view(np.uint32))


@pytest.mark.parametrize("format", QUANTIZED, ids=lambda format: format.label)
@given(raw=st.data())
@settings(max_examples=60, deadline=None)
def test_any_bytes_dequantize_as_ggml_does(format: StorageFormat, raw: st.DataObject) -> None:
    data = raw.draw(arrays(np.uint8, (3, 2 * format.block_bytes)))
    with np.errstate(all="ignore"):
        ours = dequantize(StoredTensor("w", format, (3, 64), data))
        theirs = gguf.quants.dequantize(data, ggml_type(format))
    np.testing.assert_array_equal(ours, theirs)  # NaN scales included


@given(bits=arrays(np.uint32, 64))
@settings(max_examples=100, deadline=None)
def test_bf16_rounds_as_ggml_does_for_any_bits(bits: np.ndarray) -> None:
    values = np.concatenate([bits, np.array([0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)])
    ours = quantize("w", values.view(np.float32), StorageFormat.BF16)
    assert np.array_equal(ours.data[0], gguf.quants.BF16.quantize_blocks(values.view(np.float32)))


def test_a_vector_is_one_row() -> None:
    tensor = quantize("norm", np.array([1.0, -2.5, 3.0]), StorageFormat.F16)
    assert (tensor.shape, tensor.data.shape, tensor.nbytes) == ((3,), (1, 6), 6)
    assert dequantize(tensor).tolist() == [1.0, -2.5, 3.0]


@EVERY_FORMAT
def test_finite_tensors_are_finite(format: StorageFormat) -> None:
    values = np.random.default_rng(1).standard_normal((9, 96)) * 50
    assert is_finite(quantize("w", values, format))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", [StorageFormat.F32, StorageFormat.F16, StorageFormat.BF16], ids=lambda f: f.label)
@pytest.mark.parametrize("position", [0, 65535, 65536, 66_002])  # around the edge of a piece, and the last
def test_one_bad_float_is_found(format: StorageFormat, bad: float, position: int) -> None:
    values = np.zeros((1, 66_003), np.float32)
    values[0, position] = bad
    assert not is_finite(quantize("w", values, format))


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF])
@pytest.mark.parametrize(
    ("format", "offset"),
    [(StorageFormat.Q8_0, 0), (StorageFormat.Q4_0, 0), (StorageFormat.Q4_1, 0), (StorageFormat.Q4_1, 2)],
    ids=str,
)
def test_one_bad_scale_is_found_and_bad_looking_integers_are_not(format: StorageFormat, offset: int, bits: int) -> None:
    tensor = quantize("w", np.random.default_rng(2).standard_normal((5, 96)), format)
    blocks = tensor.data.copy().reshape(15, format.block_bytes)
    payload = 4 if format is StorageFormat.Q4_1 else 2
    blocks[:, payload:] = 0xFF  # would be NaN if it were read as a scale
    good = StoredTensor("w", format, (5, 96), blocks.reshape(5, -1).copy())
    assert is_finite(good)
    blocks[14, offset : offset + 2] = np.array([bits], np.uint16).view(np.uint8)
    assert not is_finite(StoredTensor("w", format, (5, 96), blocks.reshape(5, -1)))
