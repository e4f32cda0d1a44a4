"""gemm: out = x @ weight.T (+ bias) (+ out) for many rows of x, on tensor cores: the bits of ``linear``.

Arrays (all flat)
    out      float32 [num_rows, out_stride], columns out_offset … out_offset + out_features
    x        float32 [num_rows, in_features], in_features a multiple of 4
    staged   uint32 [32-row tile of x][step][words]: x in two planes, in the order in which B is read (``planes.py``)
    weights  uint32, packed (``packing.py``): of any format but F32
    bias     float32 [out_stride] (read if has_bias)

``stage_planes`` splits x once and writes of each step (32 columns; 64 for quantised formats) and 32 rows the 4 KB, and
scales, that a warp of ``gemm`` will want of it, 16 bytes a lane.

``gemm``: a block of 8 warps makes 128 outputs for 64 rows of x, a warp 32 × 32: two tiles of the weight by 8 groups of
4 rows, in two planes each, so that a word of the weight is used 8 times from a register and a word of x twice. The
weight goes from memory straight to registers, in fragment order, a few steps ahead; the block's x comes to shared
memory by cp.async, a unit of 64 columns at a time into one of two buffers, while the other is multiplied. All reads of
it are 512 contiguous bytes of a warp: no bank is asked twice.

The order of summation is that of ``streaming``: the columns in 8 slices, each summed from zero, and the 8 sums added in
order. There 8 warps have a slice each, here one has all of them. So a token's outputs do not depend on the batch.

Grid: (64 rows of x, 128 outputs), rows first, so that blocks side by side share weights, which L2 has then.

Bytes moved: every weight byte once per 64 rows of x, from DRAM once; x once, staged once each way and once per 128
outputs, through L2. In flight a block: a unit of x, 16 KB of BF16, and of the weight what the registers hold ahead, 24.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from numba_engine.backends.arrays import Array, Segment
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.intrinsics import load_quad, store_quad
from numba_engine.backends.cuda.kernels.packing import num_tiles, num_units
from numba_engine.backends.cuda.kernels.planes import Planes
from numba_engine.backends.cuda.kernels.streaming import planes_of, read_plain
from numba_engine.backends.cuda.kernels.tensor_cores import commit_copies, copy_async, shared_address, wait_for_copies
from numba_engine.backends.cuda.kernels.unrolling import static_range, unroll
from numba_engine.formats import F16, Format, label

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 256
ROWS = 32
"""Rows of x that a warp serves."""
STAGED_ROWS = 16
"""Rows of x that a warp stages at a time."""
ROW_WARPS, PAIR_WARPS = 2, 4
"""Warps of a block along the rows of x, and along pairs of tiles of outputs."""
SLICES = 8
STAGING_THREADS = 128
STAGING_WARPS = STAGING_THREADS // 32


@cache
def _planes(format: Format, rows: int = ROWS) -> Planes:
    return planes_of(format, rows, read_plain)


def _num_row_tiles(num_rows: int) -> int:
    """Whole blocks of them."""
    return -(-num_rows // (ROW_WARPS * ROWS)) * ROW_WARPS


def staged_words(format: Format, num_rows: int, in_features: int) -> int:
    planes = _planes(format)
    return _num_row_tiles(num_rows) * num_units(in_features) * (64 // planes.step) * planes.staged_words


@cuda.jit(device=True, forceinline=True)
def write_output(out, bias, token, column, value, out_features, out_stride, out_offset, add, has_bias):  # type: ignore[no-untyped-def]
    if column < out_features:
        place = uint32(token * out_stride + out_offset + column)
        if has_bias != uint32(0):
            value += bias[uint32(out_offset + column)]
        if add != uint32(0):
            value += out[place]
        out[place] = value


@cache
def stage_planes_kernel(format: Format) -> Kernel:
    """A warp stages 16 rows, in two steps side by side, for which ``planes`` knows no bank conflicts, and takes apart
    again what that interleaves: in odd steps neighbouring columns have changed places."""
    planes = _planes(format, STAGED_ROWS)
    steps_per_unit, chunk_steps = 64 // planes.step, planes.chunk_steps
    assert chunk_steps == 2
    chunk_units = chunk_steps // steps_per_unit
    words, target_words = planes.staged_words, _planes(format, ROWS).staged_words
    step_words, scales_at = 32 * STAGED_ROWS, 32 * ROWS
    prepare, stage = planes.prepare, planes.stage
    memory_words = STAGING_WARPS * words
    is_half, is_quantized = format is F16, format.is_quantized

    def stage_planes(staged, x, num_rows, in_features, warps_per_slice):  # type: ignore[no-untyped-def]
        memory = cuda.shared.array(memory_words, uint32, 16)
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
        base = uint32(warp * uint32(words))
        index = uint32(uint32(cuda.blockIdx.x) * uint32(STAGING_WARPS) + warp)
        part = uint32(index // warps_per_slice)
        if part >= uint32(SLICES):
            return
        units = uint32(uint32(in_features + uint32(63)) >> uint32(6))
        first_unit = uint32(uint32(part * units) >> uint32(3))
        end_unit = uint32(uint32(part * units + units) >> uint32(3))
        first_column, end_column = uint32(first_unit * uint32(64)), min(in_features, uint32(end_unit * uint32(64)))
        first_row = uint32(uint32(cuda.blockIdx.y) * uint32(STAGED_ROWS))
        tile, part_of_tile = uint32(first_row // uint32(ROWS)), uint32(uint32(cuda.blockIdx.y) & uint32(1))
        source = (in_features,)
        unit = uint32(first_unit + (index - part * warps_per_slice) * uint32(chunk_units))
        if unit < end_unit:
            prepare(memory, base, x, source, first_row, num_rows, first_column, end_column, lane)
        while unit < end_unit:
            steps = min(uint32(chunk_steps), uint32(uint32(end_unit - unit) * uint32(steps_per_unit)))
            column = uint32(unit * uint32(64))
            stage(memory, base, x, source, first_row, num_rows, column, end_column, steps, lane)
            cuda.syncwarp()
            for step in range(chunk_steps):
                if uint32(step) < steps:
                    target = uint32(uint32(tile * units + unit) * uint32(steps_per_unit) + uint32(step))
                    target = uint32(target * uint32(target_words))
                    own = uint32(base + uint32(step * step_words))
                    to = uint32(target + part_of_tile * uint32(step_words))
                    for i in range(step_words // 128):
                        place = uint32(uint32(128 * i) + lane * uint32(4))
                        quad = load_quad(memory, uint32(own + (place ^ uint32(16 * (step % 2)))))
                        store_quad(staged, uint32(to + place), quad)
                    if lane < uint32(STAGED_ROWS):
                        to = uint32(part_of_tile * uint32(STAGED_ROWS) + lane)
                        own = uint32(base + uint32(chunk_steps * step_words))
                        if is_quantized:
                            quad = load_quad(memory, uint32(own + (uint32(step * STAGED_ROWS) + lane) * uint32(4)))
                            store_quad(staged, uint32(target + uint32(scales_at) + to * uint32(4)), quad)
                        if is_half:
                            staged[uint32(target + uint32(scales_at) + to)] = memory[uint32(own + lane)]
            cuda.syncwarp()
            unit = uint32(unit + warps_per_slice * uint32(chunk_units))

    arguments = (uint32[::1], float32[::1], *[uint32] * 3)
    return Kernel(f"gemm_stage_{label(format)}", stage_planes, arguments, STAGING_THREADS)


@cache
def gemm_kernel(format: Format) -> Kernel:
    planes = _planes(format)
    steps_per_unit, words, num_sums = 64 // planes.step, planes.staged_words, planes.num_sums
    depth, set_words, step_bytes = 2 * steps_per_unit, 2 * planes.tile_words, 4 * planes.step_words
    tile_quads = steps_per_unit * words // 4  # of x, of a unit and 32 rows
    buffer_words = ROW_WARPS * 4 * tile_quads
    memory_words, ring_words = 2 * buffer_words, depth * set_words
    groups = ROWS // 4
    num_totals = 4 * groups
    places, load, multiply_step, total = planes.places, planes.load, planes.multiply, planes.total

    @cuda.jit(device=True, forceinline=True)
    def copy_unit(target, staged, first_tile, unit, units):  # type: ignore[no-untyped-def]
        i = uint32(cuda.threadIdx.x)
        while i < uint32(ROW_WARPS * tile_quads):
            tile = uint32(i // uint32(tile_quads))
            source = uint32(
                uint32(uint32(first_tile + tile) * units + unit) * uint32(tile_quads) + (i - tile * uint32(tile_quads))
            )
            copy_async(uint32(target + i * uint32(16)), staged, uint32(source * uint32(4)), uint32(16))
            i = uint32(i + uint32(THREADS))
        commit_copies()

    @unroll
    def gemm(  # type: ignore[no-untyped-def]
        out,
        staged,
        weights,
        bias,
        num_rows,
        in_features,
        out_features,
        num_pairs,
        out_stride,
        out_offset,
        add,
        has_bias,
    ):
        memory = cuda.shared.array(memory_words, uint32, 16)
        ring = cuda.local.array(ring_words, uint32)
        sums = cuda.local.array(num_sums, float32)
        totals = cuda.local.array(num_totals, float32)  # [tile, group, half]
        lane = uint32(uint32(cuda.threadIdx.x) & uint32(31))
        warp = uint32(uint32(cuda.threadIdx.x) >> uint32(5))
        pair_warp, row_warp = uint32(warp >> uint32(1)), uint32(warp & uint32(1))
        pair = uint32(uint32(cuda.blockIdx.y) * uint32(PAIR_WARPS) + pair_warp)
        row_tile = uint32(uint32(cuda.blockIdx.x) * uint32(ROW_WARPS))
        units = uint32(uint32(in_features + uint32(63)) >> uint32(6))
        steps = uint32(units * uint32(steps_per_unit))
        tile = uint32(min(pair, uint32(num_pairs - uint32(1))) * uint32(2))
        places_a = places(weights, uint32(tile * units), lane)
        places_b = places(weights, uint32(tile * units + units), lane)
        target = shared_address(memory)
        copy_unit(target, staged, row_tile, uint32(0), units)
        for j in static_range(depth - 1):
            if uint32(j) < steps:
                skip = uint64(step_bytes * j)
                load(ring, set_words * j, 0, places_a, skip)
                load(ring, set_words * j, 1, places_b, skip)
        for i in range(num_totals):
            totals[i] = float32(0)
        for i in range(num_sums):
            sums[i] = float32(0)

        part, unit = uint32(0), uint32(0)
        while unit < units:
            for u in static_range(2):
                if unit < units:
                    wait_for_copies()
                    cuda.syncthreads()
                    if uint32(unit + uint32(1)) < units:
                        other = uint32(target + uint32(4 * buffer_words * (1 - u)))
                        copy_unit(other, staged, row_tile, uint32(unit + uint32(1)), units)
                    base = uint32(uint32(buffer_words * u) + row_warp * uint32(4 * tile_quads))
                    for j in static_range(steps_per_unit):
                        ahead = uint32(unit * uint32(steps_per_unit) + uint32(j + depth - 1))
                        if ahead < steps:
                            at = set_words * ((u * steps_per_unit + j + depth - 1) % depth)
                            skip = uint64(ahead) * uint64(step_bytes)
                            load(ring, at, 0, places_a, skip)
                            load(ring, at, 1, places_b, skip)
                        at = set_words * (u * steps_per_unit + j)
                        multiply_step(sums, ring, at, memory, uint32(base + uint32(words * j)), uint32(0), 0, lane)
                    unit = uint32(unit + uint32(1))
                    if uint32(uint32(part * units + units) >> uint32(3)) <= unit:
                        # the end of a slice, and of empty ones after it
                        for tile in static_range(2):
                            for group in static_range(groups):
                                for half in static_range(2):
                                    token = uint32(uint32(4 * group) + (lane & uint32(3)))
                                    totals[2 * (groups * tile + group) + half] += total(
                                        sums, tile, group, half, memory, base, token
                                    )
                        for i in range(num_sums):
                            sums[i] = float32(0)
                        while part < uint32(SLICES) and uint32(uint32(part * units + units) >> uint32(3)) <= unit:
                            part = uint32(part + uint32(1))

        if pair < num_pairs:
            for tile in static_range(2):
                for group in static_range(groups):
                    for half in static_range(2):
                        column = uint32(pair * uint32(32) + uint32(16 * tile + 8 * half) + (lane >> uint32(2)))
                        token = uint32((row_tile + row_warp) * uint32(ROWS) + uint32(4 * group) + (lane & uint32(3)))
                        if token < num_rows:
                            value = totals[2 * (groups * tile + group) + half]
                            write_output(
                                out, bias, token, column, value, out_features, out_stride, out_offset, add, has_bias
                            )

    arguments = (float32[::1], uint32[::1], uint32[::1], float32[::1], *[uint32] * 8)
    return Kernel(f"gemm_{label(format)}", gemm, arguments, THREADS)


def launch(
    backend: CudaBackend, out: Array, x: Array, staged: Array, segment: Segment, bias: Array, rest: Sequence[int]
) -> None:
    """Of one segment. ``staged`` is scratch of ``staged_words``; ``rest`` is out_offset, add and has_bias."""
    format, (num_rows, in_features) = segment.format, x.shape
    units = num_units(in_features)
    most_chunks = -(-units // SLICES)  # in a slice; two units may be one
    warps_per_slice = min(4, most_chunks) if format is F16 else most_chunks  # F16 looks at the slice first
    row_tiles, pairs = _num_row_tiles(num_rows), num_tiles(segment.num_rows) // 2
    grid = -(-SLICES * warps_per_slice // STAGING_WARPS), row_tiles * ROWS // STAGED_ROWS
    backend.launch(stage_planes_kernel(format), grid, [staged, x, num_rows, in_features, warps_per_slice])
    sizes = [num_rows, in_features, segment.num_rows, pairs, out.shape[1], *rest]
    grid = row_tiles // ROW_WARPS, -(-pairs // PAIR_WARPS)
    backend.launch(gemm_kernel(format), grid, [out, staged, segment.data, bias, *sizes])
