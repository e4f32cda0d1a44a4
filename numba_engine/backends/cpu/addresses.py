"""Addresses of arrays, which is what compiled code takes of them."""

from __future__ import annotations

from typing import cast

import numpy as np

from numba_engine.backends.arrays import Array


def address(array: Array | None) -> int:
    """0 for None."""
    return 0 if array is None else cast(np.ndarray, array).ctypes.data
