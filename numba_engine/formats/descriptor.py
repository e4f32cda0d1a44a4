"""What a storage format is, as data: where the numbers of a block lie and what they mean.

A row of a matrix is a run of blocks. A block of a quantised format holds a small integer q (a code) for each value and
one float16 d for all of them, perhaps a second one for minima; a format may scale runs of values apart by small
integers (fine scales). A value is

    w = d·s·(T[q] − zero) + m        m = ±dmin·(fine minimum), or 0

evaluated in float32 in this order; d·s and dmin·(fine minimum) are exact. Whatever reads a format (NumPy, the packers
and kernels of the backends) derives from this description.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np


class Bits(NamedTuple):
    """``width`` bits of a block, from bit ``shift`` of byte ``byte`` on; they lie within that byte."""

    byte: int
    shift: int
    width: int


Field = tuple[tuple[Bits, ...], ...]
"""For each of a block's elements (codes, fine scales) the bits that make its number, lowest first."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The small integer q of each value of a block."""

    bits: int
    """2 to 8."""
    fields: Field
    """One element per value of the block."""
    signed: bool = False
    """q is in two's complement."""
    zero: int = 0
    """Subtracted from T[q]."""
    table: tuple[int, ...] = ()
    """T: the int8 number that each code stands for; T[q] = q where empty."""


@dataclass(frozen=True, slots=True)
class Scales:
    """Of value i of a block: sign · coarse · (fine[i // run] − fine_offset)."""

    at: int
    """Byte of the block where the coarse float16 lies."""
    run: int
    """Values that share a scale: the whole block where there are no fine ones, else 16 or 32."""
    fine: Field = ()
    """block_size / run small integers; empty: the coarse scale alone."""
    fine_signed: bool = False
    fine_offset: int = 0
    sign: int = 1


class Parts(NamedTuple):
    """The numbers of blocks, one row per block: what ``Format.encode`` makes and decoding yields."""

    codes: np.ndarray
    """int [blocks, block_size]"""
    scale: np.ndarray
    """float32 [blocks, 1]: coarse, to be rounded to float16"""
    fine_scales: np.ndarray | None = None
    """int [blocks, block_size / run], the offset not yet subtracted"""
    minimum: np.ndarray | None = None
    fine_minima: np.ndarray | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Format:
    """A storage format: floats, or blocks of codes and scales. Compared by identity; pickled by name."""

    name: str
    """As ggml calls it."""
    block_size: int
    """Values per block; 1 for floats."""
    block_bytes: int
    float_type: Literal["f32", "f16", "bf16"] | None = None
    """The number that a value is, in formats without codes."""
    codes: Codes | None = None
    scales: Scales | None = None
    minima: Scales | None = None
    encode: Callable[[np.ndarray], Parts] | None = None
    """The numbers of float32 [blocks, block_size], as ggml's reference quantiser rounds."""

    @property
    def is_quantized(self) -> bool:
        return self.codes is not None

    def row_bytes(self, num_values: int) -> int:
        """Bytes of a row of ``num_values``; the caller has checked that it is a whole number of blocks."""
        assert num_values % self.block_size == 0
        return num_values // self.block_size * self.block_bytes

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return pkgutil.resolve_name, (f"numba_engine.formats:{self.name}",)
