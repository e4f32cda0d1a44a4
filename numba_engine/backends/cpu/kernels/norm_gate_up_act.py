"""norm_gate_up_act: RMSNorm, gate and up by one matrix, then the activation, while their results are in cache.

Bit for bit what the unfused ops give.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import LANES, call_kernel, load_i64, stack_bytes, store_i64
from numba_engine.backends.cpu.kernels.gated_activation import ACTIVATE_ROW
from numba_engine.backends.cpu.kernels.linear import (
    KERNEL,
    LINEAR_OUT,
    LINEAR_OUT_STRIDE,
    MOST_BLOCK_ROWS,
    NEXT,
    NEXT_BYTES,
    NUM_LINEAR_ARGS,
    PROMPT_ROWS,
    cut_alike,
    cut_rows,
    min_piece,
    num_items,
    prompt_tile,
    segment_table,
    write_linear_args,
    x_forms,
)
from numba_engine.backends.cpu.kernels.rms_norm import norm, rms_norm_kernel
from numba_engine.backends.cpu.thread_team import ARGS, announce, run
from numba_engine.backends.layers import Activation, GatedMlp

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

# Arguments of gate_up_act, behind two blocks of linear's arguments.
_GATE_ARGS, _UP_ARGS = 0, NUM_LINEAR_ARGS
_GATE_KERNEL, _UP_KERNEL, _OUT, _GATE_UP, _I, _R = range(32, 38)
_TILE_STRIDE = 2 * LANES * 4
_TILE_BYTES = MOST_BLOCK_ROWS * _TILE_STRIDE


def supports(
    backend: CpuBackend, mlp_out: Array, gate_up: Array, normed: Array, residual: Array, mlp: GatedMlp
) -> bool:
    """Gate and up are one segment or one each, of whole groups."""
    intermediate = mlp_out.shape[1]
    rows = tuple(segment.num_rows for segment in mlp.gate_up_proj.segments)
    return intermediate % LANES == 0 and rows in ((2 * intermediate,), (intermediate, intermediate))


def launch(backend: CpuBackend, mlp_out: Array, gate_up: Array, normed: Array, residual: Array, mlp: GatedMlp) -> None:
    table, norm = backend.segment_table(mlp.gate_up_proj), mlp.norm
    kernels = rms_norm_kernel(), gate_up_act_kernel(mlp.activation)
    backend.call(
        norm_gate_up_act, *kernels, table, len(table), norm.weight, norm.eps, mlp_out, mlp_out.shape[1], gate_up,
        normed, residual,
        *residual.shape, backend.prepared(*residual.shape),
    )  # fmt: skip


@Command
def norm_gate_up_act(
    team: np.ndarray, norm_kernel: int, gate_up_act: int, segments: int, num_segments: int, norm_weight: int,
    eps: float, out: int, intermediate: int, gate_up: int, normed: int, residual: int, r: int, hidden: int,
    prepared: int,
) -> None:  # fmt: skip
    table = segment_table(segments, num_segments)
    norm(team, norm_kernel, normed, residual, norm_weight, hidden, r, eps, x_forms(table), prepared)
    up = table.shape[0] - 1
    for segment, at in ((0, _GATE_ARGS), (up, _UP_ARGS)):
        write_linear_args(
            team, at, table, segment, normed, prepared, hidden, r, gate_up, 8 * intermediate, 0, 0
        )  # fmt: skip
    args = team.ctypes.data + 8 * ARGS
    if up == 0:
        cut_rows(args + 8 * _GATE_ARGS, 0, intermediate)
        cut_rows(args + 8 * _UP_ARGS, intermediate, intermediate)
    cut_alike(args + 8 * _GATE_ARGS, args + 8 * _UP_ARGS)
    team[ARGS + _GATE_KERNEL] = table[0, KERNEL]
    team[ARGS + _UP_KERNEL] = table[up, KERNEL]
    team[ARGS + _OUT] = out
    team[ARGS + _GATE_UP] = gate_up
    team[ARGS + _I] = intermediate
    team[ARGS + _R] = r
    announce(team, table[0, NEXT], table[0, NEXT_BYTES])
    run(team, gate_up_act, num_items(intermediate, r, args), (min_piece(table, 0, r) + 1) // 2)


@functools.cache
def gate_up_act_kernel(activation: Activation) -> int:
    activate_row = ACTIVATE_ROW[activation]
    args_place, tiles_place = stack_bytes(2 * 8 * NUM_LINEAR_ARGS), stack_bytes(2 * _TILE_BYTES)

    def gate_up_act_items(begin: int, end: int, args: int) -> None:
        r, intermediate = load_i64(args, _R), load_i64(args, _I)
        gate_args, up_args = args + 8 * _GATE_ARGS, args + 8 * _UP_ARGS
        gate_kernel, up_kernel = load_i64(args, _GATE_KERNEL), load_i64(args, _UP_KERNEL)
        out = load_i64(args, _OUT)
        if r < PROMPT_ROWS:
            call_kernel(gate_kernel, begin, end, gate_args)
            call_kernel(up_kernel, begin, end, up_args)
            first, columns = begin * LANES, (end - begin) * LANES
            for row in range(r):
                gate = load_i64(args, _GATE_UP) + (row * 2 * intermediate + first) * 4
                activate_row(out + (row * intermediate + first) * 4, gate, gate + intermediate * 4, columns)
            return
        own_args, tiles = args_place(0), tiles_place(0)
        own_gate_args, own_up_args = own_args, own_args + 8 * NUM_LINEAR_ARGS
        for item in range(begin, end):
            first, last, t, count = prompt_tile(gate_args, item)
            into_tile(own_gate_args, gate_args, tiles, first, t)
            into_tile(own_up_args, up_args, tiles + _TILE_BYTES, first, t)
            call_kernel(gate_kernel, item, item + 1, own_gate_args)
            call_kernel(up_kernel, item, item + 1, own_up_args)
            for row in range(count):
                gate = tiles + row * _TILE_STRIDE
                to = out + ((t + row) * intermediate + first * LANES) * 4
                activate_row(to, gate, gate + _TILE_BYTES, (last - first) * LANES)

    return kernel_address(gate_up_act_items, "void(int64, int64, int64)", activation)


@inner
def into_tile(to: int, args: int, tile: int, group: int, t: int) -> None:
    """Arguments that make the job write what begins at (group, t) to ``tile``, rows _TILE_STRIDE apart.

    Rows of gate and up would else lie a multiple of 4096 bytes apart in many models, which caches keep few of.
    """
    for i in range(NUM_LINEAR_ARGS):
        store_i64(to, i, load_i64(args, i))
    store_i64(to, LINEAR_OUT, tile - group * LANES * 4 - t * _TILE_STRIDE)
    store_i64(to, LINEAR_OUT_STRIDE, _TILE_STRIDE)
