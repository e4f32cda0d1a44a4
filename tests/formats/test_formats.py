"""Storage formats against the gguf package's own quantisers, bit for bit."""

from __future__ import annotations

import hashlib
import pickle

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from numba_engine.formats import (
    BF16,
    F16,
    F32,
    FORMATS,
    Q4_0,
    Q4_1,
    Q4_K,
    Q6_K,
    Q8_0,
    Bits,
    Format,
    StoredTensor,
    dequantize,
    is_finite,
    quantize,
)
from numba_engine.formats.blocks import pack, unpack

QUANTIZED = [format for format in FORMATS.values() if format.is_quantized]
HAS_PEER = [format for format in FORMATS.values() if format not in (Q4_K, Q6_K)]
"""The gguf package quantises to these."""
EVERY_FORMAT = pytest.mark.parametrize("format", list(FORMATS.values()), ids=repr)


def ggml_type(format: Format) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType[format.name]


def ggml_sizes(format: Format) -> tuple[int, int]:
    return gguf.GGML_QUANT_SIZES[ggml_type(format)]


def integers_of(format: Format) -> np.ndarray:
    """The bytes of a block that no float16 takes."""
    coarse = [scales.at for scales in (format.scales, format.minima) if scales]
    return np.setdiff1d(np.arange(format.block_bytes), [byte for at in coarse for byte in (at, at + 1)])


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


@pytest.mark.parametrize("format", HAS_PEER, ids=repr)
@pytest.mark.parametrize("shape", [(7, 32), (33, 96), (5, 288)])
def test_quantize_and_dequantize_equal_ggml_bit_for_bit(format: Format, shape: tuple[int, int]) -> None:
    values = awkward_values(*shape)
    with np.errstate(over="ignore"):
        ours = quantize("w", values, format)
        theirs = gguf.quants.quantize(values, ggml_type(format)).view(np.uint8).reshape(shape[0], -1)
    assert np.array_equal(ours.data, theirs)
    assert (ours.shape, ours.data.shape) == (shape, (shape[0], format.row_bytes(shape[1])))
    back = gguf.quants.dequantize(theirs, ggml_type(format)).reshape(shape)
    assert dequantize(ours).dtype == np.float32
    assert np.array_equal(dequantize(ours).view(np.uint32), back.view(np.uint32))


@pytest.mark.parametrize("format", QUANTIZED, ids=repr)
@given(raw=st.data())
@settings(max_examples=60, deadline=None)
def test_any_bytes_dequantize_as_ggml_does(format: Format, raw: st.DataObject) -> None:
    data = raw.draw(arrays(np.uint8, (3, 2 * format.block_bytes)))
    with np.errstate(all="ignore"):
        ours = dequantize(StoredTensor("w", format, (3, 2 * format.block_size), data))
        theirs = gguf.quants.dequantize(data, ggml_type(format))
    np.testing.assert_array_equal(ours, theirs)  # NaN scales included


@given(bits=arrays(np.uint32, 64))
@settings(max_examples=100, deadline=None)
def test_bf16_rounds_as_ggml_does_for_any_bits(bits: np.ndarray) -> None:
    values = np.concatenate([bits, np.array([0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF, 0x7F7FFFFF], np.uint32)])
    ours = quantize("w", values.view(np.float32), BF16)
    assert np.array_equal(ours.data[0], gguf.quants.BF16.quantize_blocks(values.view(np.float32)))


def test_a_vector_is_one_row() -> None:
    tensor = quantize("norm", np.array([1.0, -2.5, 3.0]), F16)
    assert (tensor.shape, tensor.data.shape, tensor.nbytes) == ((3,), (1, 6), 6)
    assert dequantize(tensor).tolist() == [1.0, -2.5, 3.0]


@EVERY_FORMAT
def test_finite_tensors_are_finite(format: Format) -> None:
    values = np.random.default_rng(1).standard_normal((9, 512)) * 50
    assert is_finite(quantize("w", values, format))


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("format", [F32, F16, BF16], ids=repr)
@pytest.mark.parametrize("position", [0, 65535, 65536, 66_002])  # around the edge of a piece, and the last
def test_one_bad_float_is_found(format: Format, bad: float, position: int) -> None:
    values = np.zeros((1, 66_003), np.float32)
    values[0, position] = bad
    assert not is_finite(quantize("w", values, format))


@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF])
@pytest.mark.parametrize(
    ("format", "offset"),
    [(Q8_0, 0), (Q4_0, 0), (Q4_1, 0), (Q4_1, 2), (Q4_K, 0), (Q4_K, 2), (Q6_K, 208)],
)
def test_one_bad_scale_is_found_and_bad_looking_integers_are_not(format: Format, offset: int, bits: int) -> None:
    columns = 3 * format.block_size
    tensor = quantize("w", np.random.default_rng(2).standard_normal((5, columns)), format)
    blocks = tensor.data.copy().reshape(15, format.block_bytes)
    blocks[:, integers_of(format)] = 0xFF  # would be NaN if it were read as a scale
    good = StoredTensor("w", format, (5, columns), blocks.reshape(5, -1).copy())
    assert is_finite(good)
    blocks[14, offset : offset + 2] = np.array([bits], np.uint16).view(np.uint8)
    assert not is_finite(StoredTensor("w", format, (5, columns), blocks.reshape(5, -1)))


@pytest.mark.parametrize("format", QUANTIZED, ids=repr)
def test_a_block_is_described_to_the_last_bit_once(format: Format) -> None:
    assert format.codes
    assert format.scales
    assert ggml_sizes(format) == (format.block_size, format.block_bytes)
    assert len(format.codes.fields) == format.block_size
    assert {sum(bits.width for bits in runs) for runs in format.codes.fields} == {format.codes.bits}
    fields = [*format.codes.fields]
    for scales in (format.scales, format.minima):
        if scales:
            assert len(scales.fine) in (0, format.block_size // scales.run)
            fields += [*scales.fine, (Bits(scales.at, 0, 8), Bits(scales.at + 1, 0, 8))]
    times = np.zeros((format.block_bytes, 8), np.int64)
    for byte, shift, width in (bits for runs in fields for bits in runs):
        assert shift + width <= 8
        times[byte, shift : shift + width] += 1
    assert (times == 1).all()


@pytest.mark.parametrize("format", QUANTIZED, ids=repr)
@given(raw=st.data())
@settings(max_examples=20, deadline=None)
def test_blocks_survive_being_unpacked(format: Format, raw: st.DataObject) -> None:
    data = raw.draw(arrays(np.uint8, (3, format.block_bytes)))
    with np.errstate(all="ignore"):
        again = pack(format, unpack(format, data))
    integers = integers_of(format)  # a NaN's payload is not kept
    np.testing.assert_array_equal(again[:, integers], data[:, integers])


@pytest.mark.parametrize(("format", "nrmse"), [(Q8_0, 0.006), (Q4_0, 0.1), (Q4_1, 0.085), (Q4_K, 0.08), (Q6_K, 0.02)])
def test_what_is_encoded_comes_back_near(format: Format, nrmse: float) -> None:
    values = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float32)
    values *= np.exp(np.random.default_rng(4).standard_normal((64, 1))).astype(np.float32)
    values[1, :256], values[2] = 0, -0.25
    back = dequantize(quantize("w", values, format))
    error = np.sqrt(np.square(back - values).mean(axis=1) / np.square(values).mean(axis=1))
    assert np.median(error) < nrmse
    assert error.max() < 1.5 * nrmse


@pytest.mark.parametrize("format", FORMATS.values(), ids=repr)
def test_a_format_is_one_object_wherever_it_goes(format: Format) -> None:
    assert pickle.loads(pickle.dumps(format)) is format
    assert FORMATS[format.name] is format


@pytest.mark.parametrize(
    ("format", "digest"),
    [
        (Q4_K, "30fcbf3444f14425e178e05f96ce2260fb02406081d3281df1ff52fd1cb63ad0"),
        (Q6_K, "916d11229837c51a7d8faffdb323dda38c48bbbd40a34cccc9a95350af0ad052"),
    ],
)
def test_encoders_that_the_gguf_package_has_not_equal_ggml_s_own(format: Format, digest: str) -> None:
    """SHA-256 of what ``quantize_row_*_ref`` of ggml-quants.c (2026-08) makes of these values."""
    values = np.random.default_rng(7).standard_normal((16, 512)).astype(np.float32)
    values[:4] = np.abs(values[:4])
    values[4:8] *= np.float32(1e-4)
    assert hashlib.sha256(quantize("w", values, format).data.tobytes()).hexdigest() == digest
