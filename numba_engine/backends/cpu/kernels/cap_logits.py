"""cap_logits: logits x [L, vocab] become x * scale, and those softcap * tanh(x / softcap) where there is a softcap.

Bytes moved: 2 * 4 vocab a row, in cache.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from llvmlite import ir
from numba import types

from numba_engine.backends.arrays import Array
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import kernel_address
from numba_engine.backends.cpu.intrinsics import LANES, Emitter, emit, load_f64, load_i64, store_f64, vf32
from numba_engine.backends.cpu.thread_team import ARGS, run

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

_LOGITS, _COUNT, _SCALE, _SOFTCAP = range(4)
_PIECE = 4096  # logits


def launch(backend: CpuBackend, logits: Array, scale: float, softcap: float | None) -> None:
    kernel, count = cap_logits_kernel(softcap is not None), logits.shape[0] * logits.shape[1]
    backend.call(cap_logits, kernel, logits, count, scale, softcap or 0.0)


@Command
def cap_logits(team: np.ndarray, kernel: int, logits: int, count: int, scale: float, softcap: float) -> None:
    team[ARGS + _LOGITS] = logits
    team[ARGS + _COUNT] = count
    store_f64(team.ctypes.data, ARGS + _SCALE, scale)
    store_f64(team.ctypes.data, ARGS + _SOFTCAP, softcap)
    run(team, kernel, (count + _PIECE - 1) // _PIECE, 1)


@functools.cache
def cap_logits_kernel(has_softcap: bool) -> int:
    def body(b: ir.IRBuilder, at: ir.Value, count: ir.Value, scale: ir.Value, softcap: ir.Value) -> None:
        """``count`` values at an address."""
        e = Emitter(b)
        scale, softcap = e.splat(scale), e.splat(softcap)

        def capped(x: ir.Value) -> ir.Value:
            x = b.fmul(x, scale)
            return e.soft_capped(x, softcap) if has_softcap else x

        whole = b.lshr(count, e.integer(4))
        with e.loop(whole) as i:
            place = e.at(at, i, 4 * LANES)
            e.store(capped(e.load(place, vf32, 4)), place, 4)
        place = e.at(at, b.shl(whole, e.integer(4)), 4)
        rest = e.first_lanes(b.and_(count, e.integer(LANES - 1)))
        e.masked_store(capped(e.masked_load(place, vf32, rest, 4)), place, rest, 4)

    cap_values = emit("cap_values", types.void, 4, body)

    def cap_pieces(begin: int, end: int, args: int) -> None:
        first, last = begin * _PIECE, min(end * _PIECE, load_i64(args, _COUNT))
        scale, softcap = np.float32(load_f64(args, _SCALE)), np.float32(load_f64(args, _SOFTCAP))
        cap_values(load_i64(args, _LOGITS) + first * 4, last - first, scale, softcap)

    return kernel_address(cap_pieces, "void(int64, int64, int64)", "softcap" if has_softcap else "")
