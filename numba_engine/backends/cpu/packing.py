"""Bringing a matrix from its file's layout into that of layout.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from numba_engine.backends.cpu.intrinsics import LANES
from numba_engine.backends.cpu.kernels.pack_groups import pack_groups, pack_groups_kernel
from numba_engine.backends.cpu.layout import GroupLayout, num_groups
from numba_engine.formats import StoredTensor

_MIN_THREAD_BYTES = 1 << 18


def pack(tensor: StoredTensor, out: np.ndarray, num_threads: int = 1) -> None:
    """Write ``tensor`` to ``out`` [groups, group_bytes] uint8."""
    rows, in_features = tensor.shape
    layout = GroupLayout(tensor.format, in_features)
    groups = num_groups(rows)
    assert out.shape == (groups, layout.group_bytes)
    whole = rows // LANES
    per_thread = max(-(-whole // num_threads), _MIN_THREAD_BYTES // layout.group_bytes, 1)
    if per_thread < whole:

        def pack_from(begin: int) -> None:
            end = min(begin + per_thread, whole)
            _pack_groups(tensor.data[begin * LANES : end * LANES], layout, out[begin:end])

        with ThreadPoolExecutor(num_threads) as pool:  # NumPy and compiled code run without the GIL
            list(pool.map(pack_from, range(0, whole, per_thread)))
    else:
        _pack_groups(tensor.data[: whole * LANES], layout, out[:whole])
    if whole < groups:
        padded = np.zeros((LANES, tensor.data.shape[1]), dtype=np.uint8)
        padded[: rows - whole * LANES] = tensor.data[whole * LANES :]
        _pack_groups(padded, layout, out[whole:])


def _pack_groups(data: np.ndarray, layout: GroupLayout, out: np.ndarray) -> None:
    format, groups = layout.format, out.shape[0]
    data = np.ascontiguousarray(data)
    if format.is_quantized:
        pack_groups(pack_groups_kernel(format), out, data, layout.scale_bytes, layout.blocks)
    elif format.float_type == "bf16":
        values = data.view(np.uint16)
        if layout.in_features % 2:
            values = np.pad(values, ((0, 0), (0, 1)))
        pairs = values.view(np.uint32).reshape(groups, LANES, (layout.in_features + 1) // 2)
        out.view(np.uint32).reshape(groups, (layout.in_features + 1) // 2, LANES)[...] = pairs.transpose(0, 2, 1)
    else:
        word = np.dtype(f"u{format.block_bytes}")
        values = data.view(word).reshape(groups, LANES, layout.in_features)
        out.view(word).reshape(groups, layout.in_features, LANES)[...] = values.transpose(0, 2, 1)
