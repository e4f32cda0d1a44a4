"""embedding: out [T, hidden] = table[token_ids [T]], dequantised as ``storage.dequantize`` does.

The table has the layout of packing.py, so that a tied LM head streams the same memory: a row is one lane of its group.
Bytes moved: a row of the table (in pieces of 2 or 4 bytes, one per cache line: 16 times that) and 4 hidden a token.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array, Weight
from numba_engine.backends.cpu.addresses import address
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import kernel_address
from numba_engine.backends.cpu.intrinsics import (
    LANES,
    bits_f32,
    load_f16,
    load_f32,
    load_i32,
    load_i64,
    load_u8,
    load_u16,
    store_f32,
)
from numba_engine.backends.cpu.kernels.linear import (
    FIRST_ROW,
    GROUP_BYTES,
    NUM_ROWS,
    SCALE_BYTES,
    TABLE_FIELDS,
    WEIGHTS,
)
from numba_engine.backends.cpu.packing import NUM_SCALES, QUANT_BYTES
from numba_engine.backends.cpu.thread_team import ARGS, run
from numba_engine.formats import F16, F32, Q4_0, Q4_1, Q8_0, Format

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

_OUT, _TOKEN_IDS, _HIDDEN, _WEIGHTS, _GROUP_BYTES, _SCALE_BYTES, _FIRST_ROW, _NUM_ROWS = range(8)


def launch(backend: CpuBackend, out: Array, token_ids: Array, table: Weight) -> None:
    rows = address(backend.segment_table(table))
    for i, segment in enumerate(table.segments):
        kernel, row = embedding_kernel(segment.format), rows + i * 8 * TABLE_FIELDS
        backend.call(embedding, kernel, row, address(out), address(token_ids), *out.shape)


@Command
def embedding(
    team: np.ndarray, kernel: int, segment: int, out: int, token_ids: int, num_tokens: int, hidden: int
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
    run(team, kernel, num_tokens, 8)


@functools.cache
def embedding_kernel(format: Format) -> int:
    """Address of the kernel for a table of this format."""
    is_f32, is_f16, is_q8_0, is_q4_1 = (format is f for f in (F32, F16, Q8_0, Q4_1))
    is_quantized = format.is_quantized
    quant_bytes, num_scales = QUANT_BYTES.get(format, 0), NUM_SCALES.get(format, 0)
    zero_point = np.float32(8 if format is Q4_0 else 0)

    def embedding_rows(begin: int, end: int, args: int) -> None:
        hidden = load_i64(args, _HIDDEN)
        for t in range(begin, end):
            row = np.int64(load_i32(load_i64(args, _TOKEN_IDS), t)) - load_i64(args, _FIRST_ROW)
            if row < 0 or row >= load_i64(args, _NUM_ROWS):
                continue
            lane = row % LANES
            group = load_i64(args, _WEIGHTS) + row // LANES * load_i64(args, _GROUP_BYTES)
            out = load_i64(args, _OUT) + t * hidden * 4
            if is_quantized:
                quants = group + load_i64(args, _SCALE_BYTES)
                for block in range(hidden // 32):
                    d = load_f16(group, block * num_scales * LANES + lane)
                    m = load_f16(group, (block * 2 + 1) * LANES + lane) if is_q4_1 else np.float32(0)
                    for k in range(quant_bytes):
                        byte = load_u8(quants, (block * quant_bytes // 4 + k // 4) * 64 + lane * 4 + k % 4)
                        if is_q8_0:
                            store_f32(out, block * 32 + k, d * (np.float32(byte) - np.float32(128)))
                        else:
                            low = d * (np.float32(byte & 15) - zero_point)
                            high = d * (np.float32(byte >> 4) - zero_point)
                            if is_q4_1:
                                low += m
                                high += m
                            store_f32(out, block * 32 + k, low)
                            store_f32(out, block * 32 + k + 16, high)
            else:
                for k in range(hidden):
                    if is_f32:
                        value = load_f32(group, k * LANES + lane)
                    elif is_f16:
                        value = load_f16(group, k * LANES + lane)
                    else:
                        value = bits_f32(np.int64(load_u16(group, (k // 2 * LANES + lane) * 2 + k % 2)) << 16)
                    store_f32(out, k, value)

    return kernel_address(embedding_rows, "void(int64, int64, int64)", format.name)
