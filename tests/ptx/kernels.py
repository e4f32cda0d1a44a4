"""Kernels written in numba.cuda for the tests: what the executor must run as a GPU would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda
from numba.cuda.extending import intrinsic
from numba.cuda.types import UniTuple, float32, int32, uint32, uint64, void

from numba_engine.backends.ptx import LoadedKernel, PtxDevice

f32_1d, u32_1d, i32_1d = float32[::1], uint32[::1], int32[::1]
FULL = 0xFFFFFFFF


def load(device: PtxDevice, function: Any, arguments: Sequence[Any]) -> LoadedKernel:
    """Compile with line information, so that errors name the Python line."""
    ptx, _ = cuda.compile(function, void(*arguments), device=False, cc=(9, 0), abi="numba", output="ptx", lineinfo=True)
    return device.load(ptx, name=function.__name__)


@intrinsic
def load_quad(typing_context, array, index):  # type: ignore[no-untyped-def]
    """Four consecutive uint32 in one 128-bit load that does not stay in L1."""
    quad = UniTuple(uint32, 4)

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        address = builder.ptrtoint(builder.gep(data, [builder.zext(args[1], ir.IntType(64))]), ir.IntType(64))
        i32 = ir.IntType(32)
        kind = ir.FunctionType(ir.LiteralStructType([i32] * 4), [ir.IntType(64)])
        text = "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {$0, $1, $2, $3}, [$4];"
        asm = ir.InlineAsm(kind, text, "=r,=r,=r,=r,l", side_effect=True)
        result = builder.call(asm, [address])
        return context.make_tuple(builder, signature.return_type, [builder.extract_value(result, i) for i in range(4)])

    return quad(array, uint32), generate


@intrinsic
def as_float(typing_context, bits):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.FloatType())

    return float32(uint32), generate


def block_sum(out, x, n):  # type: ignore[no-untyped-def]
    """out[block] = the sum of the block's 128-strided share, through a tree in shared memory."""
    partial = cuda.shared.array(128, float32)
    thread = cuda.threadIdx.x
    total = float32(0)
    for i in range(cuda.blockIdx.x * 128 + thread, n, 128 * cuda.gridDim.x):
        total += x[i]
    partial[thread] = total
    cuda.syncthreads()
    step = 64
    while step > 0:
        if thread < step:
            partial[thread] += partial[thread + step]
        cuda.syncthreads()
        step //= 2
    if thread == 0:
        out[cuda.blockIdx.x] = partial[0]


def gemv_bf16(y, w, x, columns):  # type: ignore[no-untyped-def]
    """y = w @ x, one warp a row; w holds pairs of bf16 in uint32, read 16 bytes a lane."""
    row = uint32(cuda.blockIdx.x * uint32(4) + cuda.threadIdx.y)
    lane = uint32(cuda.threadIdx.x)
    total = float32(0)
    at = uint32(lane * uint32(8))
    while at < columns:
        a, b, c, d = load_quad(w, uint32((row * columns + at) // uint32(2)))
        total += (
            as_float(uint32(a << uint32(16))) * x[at] + as_float(uint32(a & uint32(0xFFFF0000))) * x[at + uint32(1)]
        )
        total += (
            as_float(uint32(b << uint32(16))) * x[at + uint32(2)]
            + as_float(uint32(b & uint32(0xFFFF0000))) * x[at + uint32(3)]
        )
        total += (
            as_float(uint32(c << uint32(16))) * x[at + uint32(4)]
            + as_float(uint32(c & uint32(0xFFFF0000))) * x[at + uint32(5)]
        )
        total += (
            as_float(uint32(d << uint32(16))) * x[at + uint32(6)]
            + as_float(uint32(d & uint32(0xFFFF0000))) * x[at + uint32(7)]
        )
        at = uint32(at + uint32(256))
    for offset in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(FULL, total, offset)
    if lane == 0:
        y[row] = total


def collatz(steps, start):  # type: ignore[no-untyped-def]
    """A different number of iterations and branches in every lane."""
    i = cuda.grid(1)
    if i < start.size:
        n = uint64(start[i])
        count = 0
        while n != 1:
            n = n // uint64(2) if n % uint64(2) == 0 else uint64(3) * n + uint64(1)
            count += 1
        steps[i] = count


def histogram(counts, values):  # type: ignore[no-untyped-def]
    """Counted in shared memory by atomics, added to global memory by atomics."""
    local = cuda.shared.array(16, int32)
    thread = cuda.threadIdx.x
    if thread < 16:
        local[thread] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), values.size, cuda.gridsize(1)):
        cuda.atomic.add(local, values[i], 1)
    cuda.syncthreads()
    if thread < 16:
        cuda.atomic.add(counts, thread, local[thread])


def transpose(out, x):  # type: ignore[no-untyped-def]
    """Tiles of 32 × 33 in shared memory, two-dimensional blocks, edges cut off."""
    tile = cuda.shared.array((32, 33), float32)
    column = cuda.blockIdx.x * 32 + cuda.threadIdx.x
    row = cuda.blockIdx.y * 32
    for j in range(cuda.threadIdx.y, 32, 8):
        if row + j < x.shape[0] and column < x.shape[1]:
            tile[j, cuda.threadIdx.x] = x[row + j, column]
    cuda.syncthreads()
    column = cuda.blockIdx.y * 32 + cuda.threadIdx.x
    row = cuda.blockIdx.x * 32
    for j in range(cuda.threadIdx.y, 32, 8):
        if row + j < out.shape[0] and column < out.shape[1]:
            out[row + j, column] = tile[cuda.threadIdx.x, j]


def softmax_rows(out, x):  # type: ignore[no-untyped-def]
    """One warp a row: maximum, exponentials, sum, all by shuffles."""
    row, lane = cuda.blockIdx.x, cuda.threadIdx.x
    columns = x.shape[1]
    most = float32(-np.inf)
    for i in range(lane, columns, 32):
        most = max(most, x[row, i])
    for offset in (16, 8, 4, 2, 1):
        most = max(most, cuda.shfl_xor_sync(FULL, most, offset))
    total = float32(0)
    for i in range(lane, columns, 32):
        value = cuda.libdevice.fast_expf(float32(x[row, i] - most))
        out[row, i] = value
        total += value
    for offset in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(FULL, total, offset)
    for i in range(lane, columns, 32):
        out[row, i] /= total


def special_functions(out, x):  # type: ignore[no-untyped-def]
    """Library code: range reduction, tables, branches."""
    i = cuda.grid(1)
    if i < x.size:
        v = x[i]
        out[i, 0] = cuda.libdevice.expf(v)
        out[i, 1] = cuda.libdevice.logf(abs(v) + float32(1))
        out[i, 2] = cuda.libdevice.sinf(v * float32(1000))
        out[i, 3] = cuda.libdevice.powf(abs(v), float32(1.7))
        out[i, 4] = cuda.libdevice.tanhf(v)
        out[i, 5] = cuda.libdevice.rsqrtf(abs(v) + float32(0.5))


# ---- planted bugs ----------------------------------------------------------------------------------------------------


def bug_past_the_end(out, n):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i <= n:
        out[i] = float32(i)  # BUG


def bug_shared_past_the_end(out):  # type: ignore[no-untyped-def]
    box = cuda.shared.array(64, float32)
    thread = cuda.threadIdx.x
    box[thread] = float32(thread)
    cuda.syncthreads()
    out[thread] = box[thread + 1]  # BUG


def bug_misaligned(out, x):  # type: ignore[no-untyped-def]
    a, b, c, d = load_quad(x, uint32(cuda.threadIdx.x * uint32(4) + uint32(cuda.threadIdx.x // 20)))  # BUG
    out[cuda.threadIdx.x] = a + b + c + d


def bug_unwritten_shared(out):  # type: ignore[no-untyped-def]
    box = cuda.shared.array(64, float32)
    thread = cuda.threadIdx.x
    if thread != 40:
        box[thread] = float32(thread)
    cuda.syncthreads()
    out[thread] = box[63 - thread]  # BUG


def bug_no_barrier(out):  # type: ignore[no-untyped-def]
    box = cuda.shared.array(64, float32)
    thread = cuda.threadIdx.x
    box[thread] = float32(0)
    cuda.syncthreads()
    box[thread] = float32(thread)
    out[thread] = box[63 - thread]  # BUG


def bug_write_after_read(out):  # type: ignore[no-untyped-def]
    box = cuda.shared.array(64, float32)
    thread = cuda.threadIdx.x
    box[thread] = float32(thread)
    cuda.syncthreads()
    value = box[63 - thread]
    box[thread] = value + float32(1)  # BUG
    out[thread] = value


def bug_all_write_one_word(out):  # type: ignore[no-untyped-def]
    box = cuda.shared.array(1, float32)
    thread = cuda.threadIdx.x
    box[0] = float32(thread)  # BUG
    cuda.syncthreads()
    out[thread] = box[0]


def bug_divergent_barrier(out, limit):  # type: ignore[no-untyped-def]
    thread = cuda.threadIdx.x
    if thread < limit:
        cuda.syncthreads()  # BUG
    out[thread] = float32(thread)


def bug_early_exit_before_barrier(out, limit):  # type: ignore[no-untyped-def]
    thread = cuda.threadIdx.x
    if thread >= limit:
        return
    cuda.syncthreads()  # BUG
    out[thread] = float32(thread)


def bug_shuffle_in_a_branch(out):  # type: ignore[no-untyped-def]
    thread = cuda.threadIdx.x
    if thread != 3:
        out[thread] = cuda.shfl_xor_sync(FULL, float32(thread), 1)  # BUG


def bug_endless(out):  # type: ignore[no-untyped-def]
    i = 1
    while out[0] == 0:  # BUG
        i += 1
    out[1] = i


def bug_unwritten_global(out, x):  # type: ignore[no-untyped-def]
    out[cuda.threadIdx.x] = x[cuda.threadIdx.x]  # BUG


def warp_synchronous(out):  # type: ignore[no-untyped-def]
    """No bug: within a warp, bar.warp.sync orders what its lanes do."""
    box = cuda.shared.array(64, float32)
    thread = cuda.threadIdx.x
    box[thread] = float32(thread)
    cuda.syncwarp()
    value = box[thread ^ 1]
    cuda.syncwarp()
    box[thread] = value + float32(1)
    cuda.syncwarp()
    out[thread] = box[thread ^ 2]
