"""A tensor as its file stores it, and what its bytes mean in NumPy; kernels are tested against these functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_engine.formats import blocks
from numba_engine.formats.descriptor import Format


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A checked tensor of a checkpoint, still as its file stores it.

    ``data`` is uint8 ``[rows, row_bytes]`` (usually a view of a memory-mapped file; 1-D tensors are one row).
    ``shape`` counts values, outermost first, as in Hugging Face: a matrix is ``(out_features, in_features)``.
    """

    name: str
    format: Format
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


def dequantize(tensor: StoredTensor) -> np.ndarray:
    """The tensor's values as float32 of its shape: exact for every format (each product and sum rounded once)."""
    data = np.ascontiguousarray(tensor.data)
    match tensor.format.float_type:
        case "f32":
            values = data.view(np.float32)
        case "f16":
            values = data.view(np.float16).astype(np.float32)
        case "bf16":
            values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case None:
            parts = blocks.unpack(tensor.format, data.reshape(-1, tensor.format.block_bytes))
            values = blocks.values_of(tensor.format, parts)
    return values.reshape(tensor.shape)


def is_finite(tensor: StoredTensor) -> bool:
    """Whether the tensor holds no NaN or infinity: in a quantised format, whether its coarse scales hold none."""
    format = tensor.format
    match format.float_type:
        case "f32":
            return _max_masked(tensor.data.reshape(-1).view(np.uint32), 0x7FFFFFFF) < 0x7F800000
        case "f16":
            return _max_masked(tensor.data.reshape(-1).view(np.uint16), 0x7FFF) < 0x7C00
        case "bf16":
            return _max_masked(tensor.data.reshape(-1).view(np.uint16), 0x7FFF) < 0x7F80
        case None:
            halves = tensor.data.reshape(-1).view(np.uint16).reshape(-1, format.block_bytes // 2)
            coarse = [scales.at // 2 for scales in (format.scales, format.minima) if scales]
            return all(_max_masked(halves[:, column], 0x7FFF) < 0x7C00 for column in coarse)


def _max_masked(bits: np.ndarray, mask: int) -> int:
    """The largest of ``bits & mask``. An infinity's exponent is the largest there is, and a NaN exceeds an infinity.

    In pieces that stay in the cache, so that nothing of the tensor's size is allocated.
    """
    piece = 1 << 16
    scratch = np.empty(min(piece, bits.size), dtype=bits.dtype)
    largest = 0
    for start in range(0, bits.size, piece):
        part = bits[start : start + piece]
        masked = np.bitwise_and(part, bits.dtype.type(mask), out=scratch[: part.size])
        largest = max(largest, int(masked.max()))
    return largest


def quantize(name: str, values: np.ndarray, format: Format) -> StoredTensor:
    """Store float values in ``format``, rounding as ggml's reference quantisers do. For tests and converters.

    ``values`` is ``[rows, in_features]`` (or 1-D); in_features must be a whole number of blocks.
    """
    values = np.ascontiguousarray(values, dtype=np.float32)
    rows = values.shape[0] if values.ndim > 1 else 1
    match format.float_type:
        case "f32":
            data = values.view(np.uint8)
        case "f16":
            data = values.astype(np.float16).view(np.uint8)
        case "bf16":
            data = _round_to_bf16(values.view(np.uint32)).view(np.uint8)
        case None:
            assert format.encode
            data = blocks.pack(format, format.encode(values.reshape(-1, format.block_size)))
    return StoredTensor(name, format, tuple(values.shape), data.reshape(rows, -1))


def _round_to_bf16(bits: np.ndarray) -> np.ndarray:
    """The upper half of float32 bits, rounded to nearest even; a NaN stays one, quiet, whatever its payload."""
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)
