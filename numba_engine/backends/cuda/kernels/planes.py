"""planes: what differs between the weight formats in the loop of ``streaming``: loads, the staging of x, products.

A tensor core multiplies 16 rows of the weight (A) with 8 columns (B), and x has more digits than the 8 or 11 bits of
its operands. So x is split into two *planes*, x = high + low, and the 8 columns are the planes of 4 tokens, side by
side: column 2c is token c's high, column 2c + 1 its low. One instruction makes both products, and the lane that holds
an output's high sum holds its low sum too. ``float_planes.py`` does so for BF16 and F16, ``int8_planes.py`` for codes.

Shared memory of a warp: [step][4-token group][column ^ step parity][t < 4][words], which are the bytes of B that lane
4 g + t needs (g the column), 16 a lane, 512 together: no bank is asked twice. The parity flips neighbouring columns in
odd steps, because lanes that store the same plane of two steps at once would collide otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

COLUMNS_STAGED = 1024
"""Columns × tokens that a warp stages at a time."""


@dataclass(frozen=True, slots=True)
class Planes:
    """Of one format and a number of tokens. The functions are inlined into the kernel."""

    step: int
    """Columns a warp takes at a time."""
    chunk_steps: int
    """Steps of x staged at a time."""
    step_words: int
    """Words of a tile's step in memory."""
    tile_words: int
    """Words of a tile's step in a lane's registers."""
    num_sums: int
    """float32 accumulators of a lane: [tile 2][4-token group][…]."""
    staged_words: int
    """Words of shared memory a warp stages x in."""
    places: Callable[..., Any]
    """places(weights, unit, lane): byte addresses, of what a lane reads of the unit's first step."""
    load: Callable[..., None]
    """load(words, at, tile, places, skip): a lane's words of a step, ``skip`` bytes further on."""
    prepare: Callable[..., None]
    stage: Callable[..., None]
    multiply: Callable[..., None]
    total: Callable[..., Any]
