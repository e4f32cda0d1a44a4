"""The layout in which the CPU kernels stream a matrix.

Rows are taken in groups of 16, one row per vector lane, so that a dot product never needs a sum across lanes and a
row's result does not depend on how many activations are multiplied at once. A group is contiguous:

    F32, F16         [in_features][16 rows]
    BF16             [in_features / 2][16 rows][2], an odd last value with a zero
    Q8_0             scales [blocks][16 rows] f16, then quants [blocks][8][16 rows][4] uint8, each int8 + 128
    Q4_0             scales [blocks][16 rows] f16, then quants [blocks][4][16 rows][4] bytes of two nibbles, as stored
    Q4_1             scales [blocks][d, m][16 rows] f16, then quants as Q4_0

The scales are padded to 64 bytes and the last group to 16 rows; else a matrix takes the bytes it has in its file.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from numba_engine.backends.cpu.intrinsics import LANES
from numba_engine.formats import BF16, Q4_0, Q4_1, Q8_0, Format, StoredTensor

QUANT_BYTES = {Q8_0: 32, Q4_0: 16, Q4_1: 16}
NUM_SCALES = {Q8_0: 1, Q4_0: 1, Q4_1: 2}

_LEAST_BYTES_A_THREAD = 1 << 18


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Sizes within one group of 16 rows."""

    format: Format
    in_features: int

    @property
    def scale_bytes(self) -> int:
        if not self.format.is_quantized:
            return 0
        return -(-self.in_features // 32 * NUM_SCALES[self.format] * 2 * LANES // 64) * 64

    @property
    def group_bytes(self) -> int:
        if self.format is BF16:
            return (self.in_features + 1) // 2 * 4 * LANES
        if not self.format.is_quantized:
            return self.in_features * self.format.block_bytes * LANES
        return self.scale_bytes + self.in_features // 32 * QUANT_BYTES[self.format] * LANES


def num_groups(num_rows: int) -> int:
    return -(-num_rows // LANES)


def pack(tensor: StoredTensor, out: np.ndarray, num_threads: int = 1) -> None:
    """Write ``tensor`` to ``out`` [groups, group_bytes] uint8."""
    rows, in_features = tensor.shape
    layout = GroupLayout(tensor.format, in_features)
    groups = num_groups(rows)
    assert out.shape == (groups, layout.group_bytes)
    whole = rows // LANES
    per_thread = max(-(-whole // num_threads), _LEAST_BYTES_A_THREAD // layout.group_bytes, 1)
    if per_thread < whole:

        def pack_from(begin: int) -> None:
            end = min(begin + per_thread, whole)
            _pack_groups(tensor.data[begin * LANES : end * LANES], layout, out[begin:end])

        with ThreadPoolExecutor(num_threads) as pool:  # NumPy copies without the GIL
            list(pool.map(pack_from, range(0, whole, per_thread)))
    else:
        _pack_groups(tensor.data[: whole * LANES], layout, out[:whole])
    if whole < groups:
        padded = np.zeros((LANES, tensor.data.shape[1]), dtype=np.uint8)
        padded[: rows - whole * LANES] = tensor.data[whole * LANES :]
        _pack_groups(padded, layout, out[whole:])


def _pack_groups(data: np.ndarray, layout: GroupLayout, out: np.ndarray) -> None:
    groups = out.shape[0]
    if layout.format is BF16:
        values = np.ascontiguousarray(data).view(np.uint16)
        if layout.in_features % 2:
            values = np.pad(values, ((0, 0), (0, 1)))
        pairs = values.view(np.uint32).reshape(groups, LANES, (layout.in_features + 1) // 2)
        out.view(np.uint32).reshape(groups, (layout.in_features + 1) // 2, LANES)[...] = pairs.transpose(0, 2, 1)
        return
    if not layout.format.is_quantized:
        word = np.dtype(f"u{layout.format.block_bytes}")
        values = np.ascontiguousarray(data).view(word).reshape(groups, LANES, layout.in_features)
        out.view(word).reshape(groups, layout.in_features, LANES)[...] = values.transpose(0, 2, 1)
        return
    blocks, scales, quants = layout.in_features // 32, NUM_SCALES[layout.format], QUANT_BYTES[layout.format]
    words = np.ascontiguousarray(data).view(np.uint16).reshape(groups, LANES, blocks, scales + quants // 2)
    scale_area = out[:, : layout.scale_bytes].view(np.uint16)
    scale_area[:, blocks * scales * LANES :] = 0
    scale_out = scale_area[:, : blocks * scales * LANES].reshape(groups, blocks, scales, LANES)
    scale_out[...] = words[..., :scales].transpose(0, 2, 3, 1)
    quant_out = out[:, layout.scale_bytes :].view(np.uint16).reshape(groups, blocks, quants // 4, LANES, 2)
    quant_in = words[..., scales:].reshape(groups, LANES, blocks, quants // 4, 2).transpose(0, 2, 3, 1, 4)
    if layout.format is Q8_0:
        np.bitwise_xor(quant_in, np.uint16(0x8080), out=quant_out)
    else:
        quant_out[...] = quant_in
