"""How a tensor's numbers are stored: the formats, their block layouts, and their exact meaning in NumPy.

Block layouts are those of ggml (``ggml-common.h``): a row is a run of blocks of 32 values, each block its scale(s)
followed by its packed integers. The functions here define what a format *means*; the kernels are tested against them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np


class StorageFormat(enum.Enum):
    """A storage format: its name, values per block and bytes per block."""

    F32 = ("F32", 1, 4)
    F16 = ("F16", 1, 2)
    BF16 = ("BF16", 1, 2)
    Q8_0 = ("Q8_0", 32, 34)  # f16 d, 32 x int8:             w = d * q
    Q4_0 = ("Q4_0", 32, 18)  # f16 d, 16 bytes of nibbles:    w = d * (q - 8)
    Q4_1 = ("Q4_1", 32, 20)  # f16 d, f16 m, 16 bytes:        w = d * q + m

    def __init__(self, label: str, block_size: int, block_bytes: int) -> None:
        self.label = label
        self.block_size = block_size
        self.block_bytes = block_bytes

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1

    def row_bytes(self, num_values: int) -> int:
        """Bytes of a row of ``num_values``; the caller has checked that it is a whole number of blocks."""
        assert num_values % self.block_size == 0
        return num_values // self.block_size * self.block_bytes


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A checked tensor of a checkpoint, still as its file stores it.

    ``data`` is uint8 ``[rows, row_bytes]`` (usually a view of a memory-mapped file; 1-D tensors are one row).
    ``shape`` counts values, outermost first, as in Hugging Face: a matrix is ``(out_features, in_features)``.
    """

    name: str
    format: StorageFormat
    shape: tuple[int, ...]
    data: np.ndarray

    @property
    def nbytes(self) -> int:
        return int(self.data.nbytes)


def dequantize(tensor: StoredTensor) -> np.ndarray:
    """The tensor's values as float32 of its shape: exact for every format (each product rounded once)."""
    data = np.ascontiguousarray(tensor.data)
    match tensor.format:
        case StorageFormat.F32:
            values = data.view(np.float32)
        case StorageFormat.F16:
            values = data.view(np.float16).astype(np.float32)
        case StorageFormat.BF16:
            values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        case StorageFormat.Q8_0:
            blocks = data.reshape(-1, 34)
            values = _scale(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)
        case StorageFormat.Q4_0:
            blocks = data.reshape(-1, 18)
            values = _scale(blocks, 0) * (_nibbles(blocks[:, 2:]) - np.float32(8))
        case StorageFormat.Q4_1:
            blocks = data.reshape(-1, 20)
            values = _scale(blocks, 0) * _nibbles(blocks[:, 4:]) + _scale(blocks, 2)
    return values.reshape(tensor.shape)


def is_finite(tensor: StoredTensor) -> bool:
    """Whether the tensor holds no NaN or infinity: in a quantised format, whether its scales hold none."""
    match tensor.format:
        case StorageFormat.F32:
            return _max_masked(tensor.data.reshape(-1).view(np.uint32), 0x7FFFFFFF) < 0x7F800000
        case StorageFormat.F16:
            return _max_masked(tensor.data.reshape(-1).view(np.uint16), 0x7FFF) < 0x7C00
        case StorageFormat.BF16:
            return _max_masked(tensor.data.reshape(-1).view(np.uint16), 0x7FFF) < 0x7F80
        case StorageFormat.Q8_0 | StorageFormat.Q4_0:
            scales: tuple[int, ...] = (0,)
        case StorageFormat.Q4_1:
            scales = (0, 1)
    halves = tensor.data.reshape(-1).view(np.uint16).reshape(-1, tensor.format.block_bytes // 2)
    return all(_max_masked(halves[:, column], 0x7FFF) < 0x7C00 for column in scales)


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


def _scale(blocks: np.ndarray, offset: int) -> np.ndarray:
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Values 0…15 of 32-value blocks: low nibbles are values 0…15 of the block, high nibbles 16…31."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)


def quantize(name: str, values: np.ndarray, format: StorageFormat) -> StoredTensor:
    """Store float values in ``format``, rounding as ggml's reference quantisers do. For tests and converters.

    ``values`` is ``[rows, in_features]`` (or 1-D); in_features must be a whole number of blocks.
    """
    values = np.ascontiguousarray(values, dtype=np.float32)
    rows = values.shape[0] if values.ndim > 1 else 1
    match format:
        case StorageFormat.F32:
            data = values.view(np.uint8)
        case StorageFormat.F16:
            data = values.astype(np.float16).view(np.uint8)
        case StorageFormat.BF16:
            data = _round_to_bf16(values.view(np.uint32)).view(np.uint8)
        case _:
            data = _quantize_blocks(values.reshape(-1, format.block_size), format)
    return StoredTensor(name, format, tuple(values.shape), data.reshape(rows, -1))


def _quantize_blocks(blocks: np.ndarray, format: StorageFormat) -> np.ndarray:
    if format is StorageFormat.Q8_0:
        scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
        q = _round_half_away(blocks * _reciprocal(scale)).astype(np.int8)
        return np.concatenate([_f16_bytes(scale), q.view(np.uint8)], axis=1)
    if format is StorageFormat.Q4_0:
        extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
        scale = extreme / np.float32(-8)
        q = np.clip(blocks * _reciprocal(scale) + np.float32(8.5), 0, 15).astype(np.uint8)
        return np.concatenate([_f16_bytes(scale), q[:, :16] | (q[:, 16:] << 4)], axis=1)
    assert format is StorageFormat.Q4_1
    low = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - low) / np.float32(15)
    q = np.clip((blocks - low) * _reciprocal(scale) + np.float32(0.5), 0, 15).astype(np.uint8)
    return np.concatenate([_f16_bytes(scale), _f16_bytes(low), q[:, :16] | (q[:, 16:] << 4)], axis=1)


def _round_to_bf16(bits: np.ndarray) -> np.ndarray:
    """The upper half of float32 bits, rounded to nearest even; a NaN stays one, quiet, whatever its payload."""
    rounded = (bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16)


def _round_half_away(values: np.ndarray) -> np.ndarray:
    """C's ``roundf``; ``np.round`` would take halves to even."""
    magnitude = np.abs(values)
    whole = np.floor(magnitude)
    return np.copysign(whole + np.floor(2 * (magnitude - whole)), values)


def _reciprocal(scale: np.ndarray) -> np.ndarray:
    return np.divide(1.0, scale, out=np.zeros_like(scale), where=scale != 0)


def _f16_bytes(column: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(column.astype(np.float16)).view(np.uint8)
