"""The layout in which the CPU kernels stream a matrix.

Rows are taken in groups of 16, one row per vector lane, so that a dot product never needs a sum across lanes and a
row's result does not depend on how many activations are multiplied at once. A group is contiguous:

    F32, F16         [in_features][16 rows]
    BF16             [in_features / 2][16 rows][2], an odd last value with a zero
    quantised        coarse scales [blocks][d, m][16 rows] f16 (m where the format has minima), then [blocks] of
                         fine    [block_size / 32][scales, minima of 32 values][16 rows] int8, their offset subtracted
                         codes   [block_size / 32] of the planes of 32 values

Codes are kept as planes of 8, 4, 2 or 1 bits, the low bits in the first plane. Quarter k of the 8 quarters of 4 values
is [16 rows][4] fields of a byte: in a plane of b bits, bits k // b · b and up of vector k % b of b vectors of 64 bytes.
Signed codes are kept with their sign bit inverted, and tables hold numbers + 128, so that all are unsigned.

Coarse and fine scales are padded to 64 bytes and the last group to 16 rows, and fine scales of fewer than 8 bits take
a byte each; else a matrix takes the bytes it has in its file.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from numba_engine.backends.cpu.intrinsics import LANES
from numba_engine.formats import Format, Scales

CHUNK = 32
"""Values whose codes lie together, and for which activations have one scale."""

_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """A block of 16 rows of a quantised format. Sizes in bytes."""

    coarse: int
    """Coarse scales per block: 1, or 2 with minima."""
    chunks: int
    """Of 32 values."""
    fine_scales: int
    """Fine scales per chunk; 0 where the coarse scale stands alone."""
    fine_minima: int
    planes: tuple[int, ...]
    """Bits, low ones first."""
    zero: int
    """What a streamed code, looked up in the table, is larger by than the number it stands for."""
    table: tuple[int, ...]
    """The unsigned bytes that codes stand for; empty where they stand for themselves."""

    @property
    def has_runs(self) -> bool:
        """Whether runs of 16 values have scales or minima of their own."""
        return self.fine_scales > 1 or self.fine_minima > 1

    @property
    def coarse_bytes(self) -> int:
        return 2 * LANES * self.coarse

    @property
    def fine_chunk_bytes(self) -> int:
        return LANES * (self.fine_scales + self.fine_minima)

    @property
    def fine_bytes(self) -> int:
        return _whole_lines(self.chunks * self.fine_chunk_bytes)

    @property
    def chunk_bytes(self) -> int:
        """Of codes."""
        return CHUNK // 8 * LANES * sum(self.planes)

    @property
    def block_bytes(self) -> int:
        """Of fine scales and codes."""
        return self.fine_bytes + self.chunks * self.chunk_bytes


@functools.cache
def block_layout(format: Format) -> BlockLayout:
    codes, scales = format.codes, format.scales
    assert codes
    assert scales
    assert format.block_size % CHUNK == 0
    sign = 1 << codes.bits - 1 if codes.signed else 0
    return BlockLayout(
        coarse=2 if format.minima else 1,
        chunks=format.block_size // CHUNK,
        fine_scales=_per_chunk(scales),
        fine_minima=_per_chunk(format.minima),
        planes=_PLANES[codes.bits],
        zero=codes.zero + (128 if codes.table else sign),
        table=tuple(value + 128 for value in codes.table),
    )


def _per_chunk(scales: Scales | None) -> int:
    if scales is None or not scales.fine:
        return 0
    assert scales.run in (16, CHUNK)
    return CHUNK // scales.run


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Sizes within one group of 16 rows."""

    format: Format
    in_features: int

    @property
    def blocks(self) -> int:
        return self.in_features // self.format.block_size

    @property
    def scale_bytes(self) -> int:
        """Of coarse scales."""
        return _whole_lines(self.blocks * block_layout(self.format).coarse_bytes) if self.format.is_quantized else 0

    @property
    def group_bytes(self) -> int:
        if self.format.is_quantized:
            return self.scale_bytes + self.blocks * block_layout(self.format).block_bytes
        if self.format.float_type == "bf16":
            return (self.in_features + 1) // 2 * 4 * LANES
        return self.in_features * self.format.block_bytes * LANES


def num_groups(num_rows: int) -> int:
    return -(-num_rows // LANES)


def _whole_lines(nbytes: int) -> int:
    return -(-nbytes // 64) * 64
