"""Random weights that are as large as real ones, made without the detour over floats of the whole matrix."""

from __future__ import annotations

import numpy as np

from numba_engine.formats import Format, quantize
from numba_engine.formats.blocks import pack, unpack, values_of

_DRAWN_ROWS = 512
_RMS = 0.02


def random_rows(rng: np.random.Generator, format: Format, rows: int, columns: int) -> np.ndarray:
    """uint8 [rows, row_bytes] as a checkpoint stores them: root mean square about 0.02, mean 0. Rows repeat."""
    drawn = min(rows, _DRAWN_ROWS)
    if format.is_quantized:
        blocks = drawn * format.row_bytes(columns) // format.block_bytes
        data = _random_blocks(rng, format, blocks).reshape(drawn, -1)
    else:
        data = quantize("", rng.normal(0, _RMS, (drawn, columns)), format).data
    return np.resize(data, (rows, data.shape[1]))


def _random_blocks(rng: np.random.Generator, format: Format, count: int) -> np.ndarray:
    """Any codes and fine scales, under coarse ones that give the values the wanted mean and size."""
    parts = unpack(format, rng.integers(0, 256, (count, format.block_bytes), dtype=np.uint8))
    one, none = np.ones((count, 1), np.float32), np.zeros((count, 1), np.float32)
    values = values_of(format, parts._replace(scale=one, minimum=none))
    minimum = none
    if format.minima:
        unit = values_of(format, parts._replace(scale=none, minimum=one))
        minimum = one * (-values.mean() / unit.mean())
        values += minimum * unit
    scale = one * (_RMS / values.std())
    return pack(format, parts._replace(scale=scale, minimum=minimum * scale))
