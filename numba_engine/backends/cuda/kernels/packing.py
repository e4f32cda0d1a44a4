"""How a weight lies in device memory: the order in which ``linear`` streams it, repacked once at load.

A matrix ``[out_features, in_features]`` is cut into *stripes* of 4 rows, and each stripe's columns into *units*: what
one lane takes in one iteration. ``lanes`` (8, 16 or 32, by in_features) lanes share a stripe; iteration i covers units
``i * lanes`` and up, ``width`` of them (fewer in the last one). What an iteration needs lies together, in the order of
the loads:

    uint32 [stripe][iteration][load][lane < width][4 words]

so that load after load each lane reads 16 bytes beside its neighbour's: whole 128-byte lines, every byte once.

========  ===========  ===================================================================  ==========================
format    unit         loads of 16 bytes a lane (r: row 0…3 of the stripe)                  columns of a lane's unit
========  ===========  ===================================================================  ==========================
F32       8 columns    quad j, row r at 4j + r: 4 floats                                    quads lane, width + lane
F16 BF16  16 columns   pair j, row r at 4j + r: quads 2j and 2j + 1                         quads lane, width + lane, …
Q8_0      2 blocks     (block b, row r, half h) at 8b + 2r + h: 16 × (q + 128); scales      blocks lane, width + lane
Q4_0      2 blocks     (block b, row r) at 4b + r: nibble i of word w is q[8w + i]; scales  blocks lane, width + lane
Q4_1      2 blocks     as Q4_0, then the minima after the scales                            blocks lane, width + lane
========  ===========  ===================================================================  ==========================

Scales (and minima) are one load: 8 halves, row r of block b at half 4b + r. Rows and columns that do not fill a stripe
or a unit are padded with zeros; models whose rows are a multiple of 4 and columns of 64 have none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from numba_engine.storage import StorageFormat

STRIPE_ROWS = 4


@dataclass(frozen=True, slots=True)
class Layout:
    """The constants of a format's layout."""

    unit: int
    """Columns a lane takes in one iteration."""
    weight_loads: int
    """Loads of a unit that hold weights, all rows of the stripe."""
    scale_loads: int

    @property
    def loads(self) -> int:
        return self.weight_loads + self.scale_loads


LAYOUTS = {
    StorageFormat.F32: Layout(unit=8, weight_loads=8, scale_loads=0),
    StorageFormat.F16: Layout(unit=16, weight_loads=8, scale_loads=0),
    StorageFormat.BF16: Layout(unit=16, weight_loads=8, scale_loads=0),
    StorageFormat.Q8_0: Layout(unit=64, weight_loads=16, scale_loads=1),
    StorageFormat.Q4_0: Layout(unit=64, weight_loads=8, scale_loads=1),
    StorageFormat.Q4_1: Layout(unit=64, weight_loads=8, scale_loads=2),
}


def lanes_for(format: StorageFormat, in_features: int) -> int:
    """Lanes that share a stripe: 32, or fewer where over a fifth of them would idle. Fixes the order of summation."""
    units = num_units(format, in_features)
    slots = {lanes: -(-units // lanes) * lanes for lanes in (32, 16, 8)}
    return next((lanes for lanes, taken in slots.items() if taken <= 1.25 * units), min(slots, key=lambda n: slots[n]))


def num_units(format: StorageFormat, in_features: int) -> int:
    return -(-in_features // LAYOUTS[format].unit)


def num_stripes(out_features: int) -> int:
    return -(-out_features // STRIPE_ROWS)


def looked_up_row_bytes(format: StorageFormat, in_features: int) -> int:
    """Read to look up one row: its weights, and whole loads of scales, in which those of the stripe's rows lie."""
    layout = LAYOUTS[format]
    weights = 16 * layout.weight_loads // STRIPE_ROWS
    return num_units(format, in_features) * (weights + 16 * layout.scale_loads)


def pack(format: StorageFormat, data: np.ndarray, in_features: int) -> np.ndarray:
    """uint32, flat, of uint8 ``[out_features, row_bytes]`` as the checkpoint stores it."""
    lanes, layout = lanes_for(format, in_features), LAYOUTS[format]
    units = num_units(format, in_features)
    values_per_byte_row = data.shape[1] * format.block_size // format.block_bytes
    assert values_per_byte_row == in_features
    row_bytes = format.row_bytes(units * layout.unit)
    padding = (0, num_stripes(len(data)) * STRIPE_ROWS - len(data)), (0, row_bytes - data.shape[1])
    padded = np.pad(data, padding) if any(after for _, after in padding) else np.ascontiguousarray(data)
    rows = padded.reshape(-1, STRIPE_ROWS, units, row_bytes // units)
    full = units // lanes * lanes
    parts = [
        _PACKERS[format](np.ascontiguousarray(rows[:, :, first : first + width * count]), count, width)
        for first, width, count in ((0, lanes, units // lanes), (full, units - full, 1))
        if width * count
    ]
    return np.concatenate([part.reshape(len(rows), -1) for part in parts], axis=1).reshape(-1)


# Each packer takes uint8 [stripe, row, unit, bytes] and gives uint32 [stripe, iteration, load, lane, 4].


def _pack_f32(rows: np.ndarray, count: int, width: int) -> np.ndarray:
    words = rows.view(np.uint32).reshape(-1, STRIPE_ROWS, count, 2, width, 4)  # stripe, row, iteration, j, lane, word
    return words.transpose(0, 2, 3, 1, 4, 5).reshape(-1, count, 8, width, 4)


def _pack_half(rows: np.ndarray, count: int, width: int) -> np.ndarray:
    halves = rows.view(np.uint16).reshape(-1, STRIPE_ROWS, count, 2, 2, width, 4)
    ordered = np.ascontiguousarray(halves.transpose(0, 2, 3, 1, 5, 4, 6))  # stripe, iteration, j, row, lane, quad, half
    return ordered.view(np.uint32).reshape(-1, count, 8, width, 4)


def _pack_q8_0(rows: np.ndarray, count: int, width: int) -> np.ndarray:
    blocks = rows.reshape(-1, STRIPE_ROWS, count, 2, width, 34)
    parts = (blocks[..., 2:] ^ 0x80).reshape(-1, STRIPE_ROWS, count, 2, width, 2, 16)
    ordered = np.ascontiguousarray(parts.transpose(0, 2, 3, 1, 5, 4, 6))  # stripe, iteration, b, row, half, lane, byte
    words = ordered.view(np.uint32).reshape(-1, count, 16, width, 4)
    return np.concatenate([words, _scales(blocks[..., :2])], axis=2)


def _pack_q4_0(rows: np.ndarray, count: int, width: int) -> np.ndarray:
    blocks = rows.reshape(-1, STRIPE_ROWS, count, 2, width, 18)
    return np.concatenate([_nibbles(blocks[..., 2:]), _scales(blocks[..., :2])], axis=2)


def _pack_q4_1(rows: np.ndarray, count: int, width: int) -> np.ndarray:
    blocks = rows.reshape(-1, STRIPE_ROWS, count, 2, width, 20)
    return np.concatenate([_nibbles(blocks[..., 4:]), _scales(blocks[..., :2]), _scales(blocks[..., 2:4])], axis=2)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """From ggml's halves (value i beside value i + 16) to neighbours (value 2i beside 2i + 1)."""
    values = np.concatenate([packed & 0x0F, packed >> 4], axis=-1)
    neighbours = values[..., 0::2] | (values[..., 1::2] << 4)
    ordered = np.ascontiguousarray(neighbours.transpose(0, 2, 3, 1, 4, 5))  # stripe, iteration, b, row, lane, byte
    return ordered.view(np.uint32).reshape(len(packed), packed.shape[2], 8, packed.shape[4], 4)


def _scales(scales: np.ndarray) -> np.ndarray:
    halves = np.ascontiguousarray(scales).view(np.uint16)[..., 0]
    ordered = np.ascontiguousarray(halves.transpose(0, 2, 4, 3, 1))  # stripe, iteration, lane, b, row
    return ordered.view(np.uint32).reshape(len(scales), scales.shape[2], 1, scales.shape[4], 4)


_PACKERS: dict[StorageFormat, Callable[[np.ndarray, int, int], np.ndarray]] = {
    StorageFormat.F32: _pack_f32,
    StorageFormat.F16: _pack_half,
    StorageFormat.BF16: _pack_half,
    StorageFormat.Q8_0: _pack_q8_0,
    StorageFormat.Q4_0: _pack_q4_0,
    StorageFormat.Q4_1: _pack_q4_1,
}
