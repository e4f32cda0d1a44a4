"""embedding: out [T, hidden] = table[token_ids [T]] * scale, dequantised as ``formats.dequantize`` does.

The table has the layout of layout.py, so that a tied LM head streams the same memory: a row is one lane of its group.
Bytes moved: a row of the table (in pieces of 2 or 4 bytes, one per cache line: 16 times that) and 4 hidden a token.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from numba_engine.backends.arrays import Array, Weight
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import (
    LANES,
    bits_f32,
    load_f16,
    load_f32,
    load_f64,
    load_i8,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    store_f32,
    store_f64,
)
from numba_engine.backends.cpu.kernels.linear import (
    FIRST_ROW,
    GROUP_BYTES,
    NUM_ROWS,
    SCALE_BYTES,
    WEIGHTS,
)
from numba_engine.backends.cpu.layout import CHUNK, block_layout
from numba_engine.backends.cpu.thread_team import ARGS, run
from numba_engine.formats import Format, label

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

_OUT, _TOKEN_IDS, _HIDDEN, _WEIGHTS, _GROUP_BYTES, _SCALE_BYTES, _FIRST_ROW, _NUM_ROWS, _SCALE = range(9)


def launch(backend: CpuBackend, out: Array, token_ids: Array, table: Weight, scale: float) -> None:
    for segment, row in zip(table.segments, backend.segment_table(table), strict=True):
        backend.call(embedding, embedding_kernel(segment.format), row, out, token_ids, *out.shape, scale)


@Command
def embedding(
    team: np.ndarray, kernel: int, segment: int, out: int, token_ids: int, num_tokens: int, hidden: int, scale: float
) -> None:
    """``segment``: address of its row of the table's table."""
    team[ARGS + _OUT] = out
    team[ARGS + _TOKEN_IDS] = token_ids
    team[ARGS + _HIDDEN] = hidden
    team[ARGS + _WEIGHTS] = load_i64(segment, WEIGHTS)
    team[ARGS + _GROUP_BYTES] = load_i64(segment, GROUP_BYTES)
    team[ARGS + _SCALE_BYTES] = load_i64(segment, SCALE_BYTES)
    team[ARGS + _FIRST_ROW] = load_i64(segment, FIRST_ROW)
    team[ARGS + _NUM_ROWS] = load_i64(segment, NUM_ROWS)
    store_f64(team.ctypes.data, ARGS + _SCALE, scale)
    run(team, kernel, num_tokens, 8)


@functools.cache
def embedding_kernel(format: Format) -> int:
    """Address of the kernel for a table of this format."""
    write_row = _quantized_row(format) if format.is_quantized else _float_row(format)

    def embedding_rows(begin: int, end: int, args: int) -> None:
        hidden, scale = load_i64(args, _HIDDEN), np.float32(load_f64(args, _SCALE))
        for t in range(begin, end):
            row = np.int64(load_i32(load_i64(args, _TOKEN_IDS), t)) - load_i64(args, _FIRST_ROW)
            if 0 <= row < load_i64(args, _NUM_ROWS):
                group = load_i64(args, _WEIGHTS) + row // LANES * load_i64(args, _GROUP_BYTES)
                out = load_i64(args, _OUT) + t * hidden * 4
                write_row(out, group, group + load_i64(args, _SCALE_BYTES), row % LANES, hidden)
                for k in range(hidden):
                    store_f32(out, k, load_f32(out, k) * scale)

    return kernel_address(embedding_rows, "void(int64, int64, int64)", label(format))


def _float_row(format: Format) -> Any:
    float_type = format.float_type

    @inner
    def write(out: int, group: int, stream: int, lane: int, hidden: int) -> None:
        for k in range(hidden):
            if float_type == "f32":
                value = load_f32(group, k * LANES + lane)
            elif float_type == "f16":
                value = load_f16(group, k * LANES + lane)
            else:
                value = bits_f32(np.int64(load_u16(group, (k // 2 * LANES + lane) * 2 + k % 2)) << 16)
            store_f32(out, k, value)

    return write


def _quantized_row(format: Format) -> Any:
    layout = block_layout(format)
    assert format.scales
    block_size, block_bytes, num_coarse = format.block_size, layout.block_bytes, layout.coarse
    fine_scales, fine_minima, has_minima = layout.fine_scales, layout.fine_minima, format.minima is not None
    fine_bytes, fine_chunk_bytes, chunk_bytes = layout.fine_bytes, layout.fine_chunk_bytes, layout.chunk_bytes
    planes = layout.planes
    table = np.array(layout.table or range(256), dtype=np.float32) - np.float32(layout.zero)
    scale_sign = np.float32(format.scales.sign)
    minimum_sign = np.float32(format.minima.sign if format.minima else 1)

    @inner
    def write(out: int, group: int, stream: int, lane: int, hidden: int) -> None:
        for block in range(hidden // block_size):
            d = scale_sign * load_f16(group, block * num_coarse * LANES + lane)
            dmin = minimum_sign * load_f16(group, (block * num_coarse + 1) * LANES + lane) if has_minima else d
            of_block = stream + block * block_bytes
            for i in range(block_size):
                chunk, k = i // CHUNK, i % CHUNK
                fine = of_block + chunk * fine_chunk_bytes + lane
                scale = d
                if fine_scales:
                    scale *= np.float32(load_i8(fine, k * fine_scales // CHUNK * LANES))
                address = of_block + fine_bytes + chunk * chunk_bytes + lane * 4 + k % 4
                quarter, code, low = k // 4, np.int64(0), 0
                for plane in planes:
                    byte = np.int64(load_u8(address, quarter % plane * 64))
                    code |= ((byte >> quarter // plane * plane) & ((1 << plane) - 1)) << low
                    address += 64 * plane
                    low += plane
                value = scale * table[code]
                if has_minima:
                    minimum = dmin
                    if fine_minima:
                        minimum *= np.float32(load_i8(fine, (fine_scales + k * fine_minima // CHUNK) * LANES))
                    value += minimum
                store_f32(out, block * block_size + i, value)

    return write
