"""How a weight lies in device memory: in the order of tensor-core fragments, repacked once at load.

A matrix ``[out_features, in_features]`` is cut into *tiles* of 16 rows, and a tile's columns into *units* of 64:

    uint32 [tile][unit][weights, then scales]

A warp's load of 16 bytes per lane is 512 contiguous bytes, and what it brings a lane is that lane's share of the A
operand of ``mma.sync`` (PTX ISA, "Matrix Fragments for mma.m16n8k16", "… m16n8k32"): nothing is shuffled or staged.
Lane 4 g + t (g < 8, t < 4) holds rows g and g + 8 of the tile (h = 0, 1), and of every group of 32 columns two quads of
neighbouring columns (i = 0, 1): 8t + 4i … + 3, or 16i + 4t … + 3 where runs of 16 columns have scales of their own, so
that i is the run. (The instruction says 2t, 2t + 1, …; columns may be in any order as long as x is in the same one.)

Weights
    F16, BF16   [group][i][lane][4]: word 2p + h is columns 2p, 2p + 1 of the quad.
    codes       cut into *planes* of 8, 4, 2 or 1 bits, the lowest first (``CODE_PLANES``): [load][lane][up to 4 words].
                A quad's codes lie in the four bytes of a word; ``PLACES`` says of which word, and at which bit. Codes
                whose zero is in their middle are in two's complement.

Scales, of a pair of rows g and g + 8, [g] each
    coarse      halves, row g below and row g + 8 above: [group][d, m] (blocks of 32), [d, m] (longer blocks).
    fine        signed bytes [scale, minimum][h][run], those of the unit's runs of 32 or 16 columns.

m is there only in formats with minima, fine ones only where the format has them. In bytes of a unit: F16, BF16 2048,
Q8_0 1088, Q4_0 576, Q4_1 640, as many as the checkpoint's; Q4_K 640 and Q6_K 864 (checkpoint: 576 and 840), since each
unit has its own d and m, and fine scales of 6 bits are bytes here. F32, which no tensor core multiplies exactly, stays
row after row. Rows are padded with zeros to a multiple of 32 (F32: none), columns to one of 64 (F32: 4).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product

import numba
import numpy as np

from numba_engine.formats import F32, Codes, Format
from numba_engine.formats.blocks import unpack_scales

TILE_ROWS = 16
UNIT = 64
"""Columns of a unit."""
CODE_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""By the bits of a code: the bits of its planes."""
PLACES = {
    8: ((4, 2, 1), (0, 0, 0)),
    4: ((2, 0, 1), (0, 4, 0)),
    2: ((0, 0, 1), (4, 2, 0)),
    1: ((0, 0, 0), (2, 1, 4)),
}
"""By the bits of a plane: what group, i and h add to the number of a lane's word, and to the bit in its bytes."""
_CHUNK_VALUES = 1 << 19
"""Packed at a time: what stays in cache while it is taken apart."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Words of a format's unit: 16 rows × 64 columns."""

    planes: tuple[int, ...]
    """Bits of each plane of the codes; (16,) for halves."""
    coarse_words: int
    """Of a pair of rows."""
    fine_words: int
    run: int = 0
    """Columns that share a scale; 0 for floats."""

    @property
    def weight_words(self) -> int:
        return TILE_ROWS * UNIT // 32 * sum(self.planes)

    @property
    def unit_words(self) -> int:
        return self.weight_words + TILE_ROWS // 2 * (self.coarse_words + self.fine_words)


@cache
def layout_of(format: Format) -> Layout:
    """Of any format but F32."""
    codes, scales, minima = format.codes, format.scales, format.minima
    if codes is None or scales is None:
        return Layout((16,), 0, 0)
    run = scales.run if scales.fine else 32
    assert format.block_size in (32, 64, 128, 256), "blocks of whole groups of columns"
    assert run in (16, 32), "runs of 16 or 32 columns"
    assert run == 32 or minima is None, "minima of 16 columns would need sums of 16 activations"
    kinds = [kind for kind in (scales, minima) if kind]
    groups = UNIT // 32 if format.block_size == 32 else 1
    fine_kinds = sum(bool(kind.fine) for kind in kinds)
    return Layout(CODE_PLANES[codes.bits], groups * len(kinds), fine_kinds * 2 * (UNIT // run) // 4, run)


def is_twos_complement(codes: Codes) -> bool:
    """Whether codes are stored less their zero; else as they are."""
    return not codes.table and (codes.signed or codes.zero == 1 << (codes.bits - 1))


def num_units(in_features: int) -> int:
    return -(-in_features // UNIT)


def num_tiles(out_features: int) -> int:
    """Always even: a block of threads takes two."""
    return -(-out_features // (2 * TILE_ROWS)) * 2


def looked_up_row_bytes(format: Format, in_features: int) -> int:
    """Read to look up one row: its weights, and the words of scales, each of which holds another row's too."""
    if format is F32:
        return format.row_bytes(in_features)
    layout = layout_of(format)
    per_row = layout.weight_words // TILE_ROWS + layout.coarse_words + layout.fine_words
    return num_units(in_features) * 4 * per_row


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
        return _words(halves.transpose(0, 3, 4, 6, 2, 5, 7, 1, 8))
    packed = np.zeros((tiles, units, layout_of(format).unit_words), np.uint32)
    step = max(1, _CHUNK_VALUES // (TILE_ROWS * UNIT * units))
    chunks = [slice(first, first + step) for first in range(0, tiles, step)]
    rows_of = padded.reshape(tiles, TILE_ROWS, -1)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda chunk: _pack_tiles(format, rows_of[chunk], packed[chunk]), chunks))
    return packed.reshape(-1)


def _pack_tiles(format: Format, rows: np.ndarray, packed: np.ndarray) -> None:
    """Of uint8 [tiles, TILE_ROWS, row_bytes] to uint32 [tiles, units, unit_words] of zeros."""
    layout, kinds = layout_of(format), [kind for kind in (format.scales, format.minima) if kind]
    tiles, units, _ = packed.shape
    pack_codes(rows, packed.view(np.uint8), *_code_tables(format))
    coarse_and_fine = unpack_scales(format, rows.reshape(-1, format.block_bytes))
    coarse = [values * np.float32(kind.sign) for values, kind in zip(coarse_and_fine[::2], kinds, strict=True)]
    fine = [values - kind.fine_offset for values, kind in zip(coarse_and_fine[1::2], kinds, strict=True) if kind.fine]
    halves = np.concatenate(coarse, axis=1).astype(np.float16).reshape(tiles * TILE_ROWS, -1, len(coarse))
    scales = [_packed_coarse(halves, units, layout)]
    if fine:
        numbers = np.stack(fine, axis=1).astype(np.int8)  # [blocks, kinds, runs]
        scales.append(_packed_fine(numbers.reshape(tiles * TILE_ROWS, -1, *numbers.shape[1:]), units))
    packed[..., layout.weight_words :] = np.concatenate([w.reshape(tiles, units, -1) for w in scales], axis=2)


@cache
def _code_tables(format: Format) -> tuple[np.ndarray | int, ...]:
    """What ``pack_codes`` must know of a format."""
    codes, layout = format.codes, layout_of(format)
    assert codes
    most_runs = max(len(runs) for runs in codes.fields)
    fields = np.zeros((format.block_size, most_runs, 3), np.int32)
    for element, runs in enumerate(codes.fields):
        fields[element, : len(runs)] = runs
    places = np.empty((len(layout.planes), UNIT, 2, 2), np.int32)
    planes = np.empty((len(layout.planes), 3), np.int32)
    low = 0
    for index, bits in enumerate(layout.planes):
        words, shifts = PLACES[bits]
        per_lane = min(bits, 4)
        planes[index] = low, bits, 4 * 4 * per_lane
        for column, h in product(range(UNIT), range(2)):
            group, t, i, j = _place_of(column, layout.run)
            lane_word = words[0] * group if bits < 8 else 128 * group  # two loads of 8 bits, one of each group
            word = 32 * low + t * per_lane + lane_word + words[1] * i + words[2] * h
            places[index, column, h] = 4 * word + j, shifts[0] * group + shifts[1] * i + shifts[2] * h
        low += bits
    subtracted = codes.zero if is_twos_complement(codes) else 0
    return fields, format.block_bytes, subtracted, (1 << codes.bits) - 1, planes, places


def _place_of(column: int, run: int) -> tuple[int, int, int, int]:
    """Group, t, i and byte of a unit's column."""
    group, column = divmod(column, 32)
    if run == 16:
        return group, column // 4 % 4, column // 16, column % 4
    return group, column // 8, column // 4 % 2, column % 4


@numba.njit(nogil=True)
def pack_codes(rows, packed, fields, block_bytes, subtracted, mask, planes, places):  # type: ignore[no-untyped-def]
    """The codes of uint8 [tiles, TILE_ROWS, row_bytes] to their places in uint8 [tiles, units, unit_bytes].

    fields int32 [block_size, runs, 3]: byte, shift and width of each part of a code; planes [planes, 3]: lowest bit,
    bits, and bytes from g to g + 1; places [planes, UNIT, h, 2]: byte of the unit, and the bit in it.
    """
    tiles, units, _ = packed.shape
    block_size, runs = fields.shape[0], fields.shape[1]
    for tile in range(tiles):
        for row in range(TILE_ROWS):
            h, g = row >> 3, row & 7
            for column in range(units * UNIT):
                block, element = divmod(column, block_size)
                code, low = 0, 0
                for r in range(runs):
                    byte, shift, width = fields[element, r, 0], fields[element, r, 1], fields[element, r, 2]
                    code |= ((rows[tile, row, block * block_bytes + byte] >> shift) & ((1 << width) - 1)) << low
                    low += width
                code = (code - subtracted) & mask
                unit, in_unit = column // UNIT, column % UNIT
                for p in range(planes.shape[0]):
                    part = (code >> planes[p, 0]) & ((1 << planes[p, 1]) - 1)
                    to = places[p, in_unit, h, 0] + g * planes[p, 2]
                    packed[tile, unit, to] |= part << places[p, in_unit, h, 1]


def _packed_coarse(halves: np.ndarray, units: int, layout: Layout) -> np.ndarray:
    """Of float16 [rows, blocks, kinds]. Blocks longer than a unit stand in each of their units."""
    _, blocks, kinds = halves.shape
    groups = layout.coarse_words // kinds
    repeated = np.repeat(halves, units * groups // blocks, axis=1)
    return _words(repeated.reshape(-1, 2, 8, units, groups, kinds).transpose(0, 3, 2, 4, 5, 1))


def _packed_fine(numbers: np.ndarray, units: int) -> np.ndarray:
    """Of int8 [rows, blocks, kinds, runs of a block]."""
    num_rows, _, kinds, _ = numbers.shape
    runs = numbers.transpose(0, 2, 1, 3).reshape(num_rows // TILE_ROWS, 2, 8, kinds, units, -1)
    return _words(runs.transpose(0, 4, 2, 3, 1, 5))


def _padded(data: np.ndarray, num_rows: int, row_bytes: int) -> np.ndarray:
    padding = (0, num_rows - len(data)), (0, row_bytes - data.shape[1])
    return np.pad(data, padding) if any(after for _, after in padding) else np.ascontiguousarray(data)


def _words(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint32)
