"""How a weight lies in device memory: in the order of tensor-core fragments, repacked once at load.

A matrix ``[out_features, in_features]`` is cut into *tiles* of 16 rows, and a tile's columns into *units* of 64:

    uint32 [tile][unit][weights, then scales]

A warp's load of 16 bytes a lane is 512 contiguous bytes, and what it brings a lane is that lane's share of the A
operand of ``mma.sync`` (PTX ISA, "Matrix Fragments for mma.m16n8k16", "… m16n8k32"): nothing is shuffled or staged.
Lane 4 g + t (g < 8, t < 4) holds rows g and g + 8 of the tile, and of every group of 32 columns the 8 columns 8t …
8t + 7. (The instruction says 2t, 2t + 1, …; columns may be in any order within a group as long as x is in the same one.
This one makes a lane's share of x contiguous too.) In words, ``group`` being the half of the unit:

=========  ===================================================================================  ============
format     weights                                                                              scales
=========  ===================================================================================  ============
F16 BF16   [group][i < 2][lane][4]: word 2p + h is row g + 8h, columns 8t + 4i + 2p, + 1         none
Q8_0       [group][lane][4]: word 2i + h is row g + 8h, columns 8t + 4i … + 3 as signed bytes    [g][group]
Q4_0 Q4_1  [lane][group][2]: word h is row g + 8h; byte j is column 8t + j in its low nibble     [g][group]
           and column 8t + 4 + j in its high one (Q4_0: two's complement, q - 8)                (d; Q4_1 d, m)
=========  ===================================================================================  ============

A word of scales holds two halves: row g below, row g + 8 above. Q4_1 has d and m side by side: [g][group][d, m]. So a
unit is 2048 bytes (F16, BF16), 1088 (Q8_0), 576 (Q4_0) or 640 (Q4_1), as many as the checkpoint's. F32, which no tensor
core multiplies exactly, stays row after row. Rows are padded with zeros to a multiple of 32 (F32: none), columns to
one of 64 (F32: 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from numba_engine.formats import BF16, F16, F32, Q4_0, Q4_1, Q8_0, Format

TILE_ROWS = 16
UNIT = 64
"""Columns of a unit."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Words of a format's unit: 16 rows × 64 columns."""

    weight_words: int
    scale_words: int

    @property
    def unit_words(self) -> int:
        return self.weight_words + self.scale_words


LAYOUTS = {
    F16: Layout(512, 0),
    BF16: Layout(512, 0),
    Q8_0: Layout(256, 16),
    Q4_0: Layout(128, 16),
    Q4_1: Layout(128, 32),
}


def num_units(in_features: int) -> int:
    return -(-in_features // UNIT)


def num_tiles(out_features: int) -> int:
    """Always even: a block of threads takes two."""
    return -(-out_features // (2 * TILE_ROWS)) * 2


def looked_up_row_bytes(format: Format, in_features: int) -> int:
    """Read to look up one row: its weights, and the words of scales, each of which holds another row's too."""
    if format is F32:
        return format.row_bytes(in_features)
    layout = LAYOUTS[format]
    return num_units(in_features) * (4 * layout.weight_words // TILE_ROWS + 4 * layout.scale_words // (TILE_ROWS // 2))


def pack(format: Format, data: np.ndarray, in_features: int) -> np.ndarray:
    """uint32, flat, of uint8 ``[out_features, row_bytes]`` as the checkpoint stores it."""
    assert data.shape[1] == format.row_bytes(in_features)
    if format is F32:
        return _padded(data, len(data), -(-in_features // 4) * 16).view(np.uint32).reshape(-1)
    tiles, units = num_tiles(len(data)), num_units(in_features)
    padded = _padded(data, tiles * TILE_ROWS, format.row_bytes(units * UNIT))
    if not format.is_quantized:
        # [tile, h, g, unit, group, t, i, p, value]
        halves = padded.view(np.uint16).reshape(tiles, 2, 8, units, 2, 4, 2, 2, 2)
        return _words(halves.transpose(0, 3, 4, 6, 2, 5, 7, 1, 8)).reshape(-1)
    blocks = padded.reshape(tiles, 2, 8, units, 2, format.block_bytes)  # tile, h, g, unit, group
    num_scales = 2 if format is Q4_1 else 1
    values, scales = blocks[..., 2 * num_scales :], blocks[..., : 2 * num_scales]
    weights = _bytes(values) if format is Q8_0 else _nibbles(values, 8 * (format is Q4_0))
    halves = np.ascontiguousarray(scales).view(np.uint16)  # [tile, h, g, unit, group, which]
    parts = [weights.reshape(tiles, units, -1), _words(halves.transpose(0, 3, 2, 4, 5, 1)).reshape(tiles, units, -1)]
    return np.concatenate(parts, axis=2).reshape(-1)


def _bytes(values: np.ndarray) -> np.ndarray:
    """Of uint8 [tile, h, g, unit, group, 32]."""
    tiles, units = values.shape[0], values.shape[3]
    columns = values.reshape(tiles, 2, 8, units, 2, 4, 2, 4)  # … t, i, j
    return _words(columns.transpose(0, 3, 4, 2, 5, 6, 1, 7))


def _nibbles(values: np.ndarray, offset: int) -> np.ndarray:
    """Of uint8 [tile, h, g, unit, group, 16], ggml's order: column i beside column i + 16."""
    tiles, units = values.shape[0], values.shape[3]
    columns = np.concatenate([values & 0x0F, values >> 4], axis=-1) ^ np.uint8(offset)
    pairs = columns.reshape(tiles, 2, 8, units, 2, 4, 2, 4)  # … t, low or high, j
    octets = pairs[..., 0, :] | (pairs[..., 1, :] << 4)  # tile, h, g, unit, group, t, j
    return _words(octets.transpose(0, 3, 2, 5, 4, 1, 6))


def _padded(data: np.ndarray, num_rows: int, row_bytes: int) -> np.ndarray:
    padding = (0, num_rows - len(data)), (0, row_bytes - data.shape[1])
    return np.pad(data, padding) if any(after for _, after in padding) else np.ascontiguousarray(data)


def _words(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view(np.uint32)
