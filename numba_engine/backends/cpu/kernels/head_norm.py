"""head_norm: RMSNorm of every q head and k head of qkv [T, (H + 2 KV) D] by itself, in place (Qwen3).

q_norm, k_norm: [D] float32. Bytes moved: q and k once in and out, in cache.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

from numba_engine.backends.arrays import Array, Norm
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import load_f64, load_i64, store_f64
from numba_engine.backends.cpu.kernels.rms_norm import norm_row
from numba_engine.backends.cpu.thread_team import ARGS, run
from numba_engine.backends.layers import Attention

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

_QKV, _ROW, _Q_NORM, _K_NORM, _H, _KV, _D, _EPS = range(8)


def launch(backend: CpuBackend, qkv: Array, q_norm: Norm, k_norm: Norm, shape: Attention) -> None:
    backend.call(
        head_norm, head_norm_kernel(), qkv, *qkv.shape, q_norm.weight, k_norm.weight,
        shape.num_heads, shape.num_kv_heads, shape.head_dim, q_norm.eps,
    )  # fmt: skip


@Command
def head_norm(
    team: np.ndarray, kernel: int, qkv: int, num_tokens: int, row: int, q_norm: int, k_norm: int, num_heads: int,
    num_kv_heads: int, d: int, eps: float,
) -> None:  # fmt: skip
    team[ARGS + _QKV] = qkv
    team[ARGS + _ROW] = row
    team[ARGS + _Q_NORM] = q_norm
    team[ARGS + _K_NORM] = k_norm
    team[ARGS + _H] = num_heads
    team[ARGS + _KV] = num_kv_heads
    team[ARGS + _D] = d
    store_f64(team.ctypes.data, ARGS + _EPS, eps)
    run(team, kernel, num_tokens, 1 + 8192 // row)


@functools.cache
def head_norm_kernel() -> int:
    def head_norm_rows(begin: int, end: int, args: int) -> None:
        eps = np.float32(load_f64(args, _EPS))
        for t in range(begin, end):
            norm_heads(
                load_i64(args, _QKV) + t * load_i64(args, _ROW) * 4, load_i64(args, _Q_NORM), load_i64(args, _K_NORM),
                load_i64(args, _H), load_i64(args, _KV), load_i64(args, _D), eps,
            )  # fmt: skip

    return kernel_address(head_norm_rows, "void(int64, int64, int64)")


@inner
def norm_heads(row: int, q_norm: int, k_norm: int, num_heads: int, num_kv_heads: int, d: int, eps: float) -> None:
    for head in range(num_heads + num_kv_heads):
        address = row + head * d * 4
        norm_row(address, address, q_norm if head < num_heads else k_norm, d, eps)
