"""linear: out = x @ weight.T (+ bias) (+ out), one kernel from a single row (GEMV) to many (tiled GEMM).

Arrays (all flat)
    out      float32 [num_rows, out_stride], columns out_offset … out_offset + out_features
    x        float32 [num_rows, in_features], in_features a multiple of 4
    weights  uint32, packed (``packing.py``): F32, F16, BF16, Q8_0, Q4_0 or Q4_1
    bias     float32 [out_stride] (read if has_bias)

Who does what. ``lanes`` neighbouring threads own a stripe of 4 rows of the weight; a block of 256 threads has 8 warps
that never meet except to stage x. Every lane takes 4 rows × its unit of columns an iteration: it issues the unit's 8 to
18 independent 16-byte weight loads back to back (4 to 9 KB a warp in flight), and only then waits for x. Integers
become floats in registers; a block's scale multiplies its finished partial dot. Partial dots meet in a butterfly of
shuffles whose first steps halve the rows a lane cares for, and lanes 0 … 3 write one row each.

Shared memory holds a chunk of x: [columns, chunk] floats, and for the quantised formats the sum of each 32 of them
(a weight is d·(q − 8): Σ d·(q − 8)·x = d·(Σ q·x − 8·Σ x), so the offset costs one FMA a block). All warps read the same
x (32 to 128 rows share it), so it comes from L2 once a block. A lane reads 16 bytes of x for 4 rows × 4 multiplies.
Reads must not collide in the banks: the float formats give neighbouring lanes neighbouring quads. A lane of a quantised
format owns a whole block, 128 bytes from its neighbour's, so the quads of block B are stored XOR-ed: quad j at place
j ^ (B % 8); 8 lanes reading "their quad j" then touch 8 different bank groups, and so do the 8 writers of one block.

Integers to floats without conversions (they run at half rate or less): a 4-bit q is masked into the mantissa of 16,
bits 19 … 22, which makes 16 + q; 16 goes with the offset. A byte is permuted under the exponent of 2^23 and that
subtracted again, exactly. Two instructions and an FMA a weight.

As a GEMM a block is a tile of 32 outputs (128 with 8 lanes a stripe) × 8 rows of x: 8 warps stream their own rows of
the weight, widen each value once for 8 multiplies, and share the tile of x, 1024 columns at a time, in shared memory.
It is bound by float32 FMAs; tensor cores would be the next step, and another order of summation.

One order of summation. ``num_rows`` only chooses how many columns of x (1, 2, 4 or 8) a lane keeps in registers, and
how many times the grid repeats: each output is the same FMAs in the same order whatever the batch. So a request's
tokens do not depend on what runs beside it.

Bytes moved: every weight byte once per ``columns`` rows of x (from DRAM once: the grid's repeats meet in L2);
x once a block, out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.device import Device, DeviceArray, flat
from numba_engine.backends.cuda.kernels.intrinsics import (
    float_of,
    float_of_bf16,
    float_of_byte,
    float_of_half,
    float_of_nibble,
    fma,
    load_quad,
    load_weights,
    select,
    store_quad,
)
from numba_engine.backends.cuda.kernels.packing import LAYOUTS, lanes_for, num_stripes
from numba_engine.backends.cuda.kernels.reductions import FULL_WARP
from numba_engine.backends.cuda.kernels.unrolling import static_range, unroll
from numba_engine.storage import StorageFormat

THREADS = 256
COLUMNS = (1, 2, 4, 8)
"""Rows of x that one pass over the weights serves."""
_CHUNK = {1: 4096, 2: 4096, 4: 2048, 8: 1024}
"""Columns of x staged at a time, by rows of x: 16 to 32 KiB of shared memory."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive rows of a weight in one format, packed (``packing.py``)."""

    format: StorageFormat
    num_rows: int
    weights: DeviceArray


@cache
def linear_kernel(format: StorageFormat, columns: int) -> Kernel:
    """The kernel of one storage format that serves ``columns`` rows of x a pass."""
    function = (_quantized if format.is_quantized else _float)(format, columns)
    arguments = (float32[::1], float32[::1], uint32[::1], float32[::1], *[uint32] * 8)
    return Kernel(f"linear_{format.label.lower()}_x{columns}", function, arguments, THREADS)


def _float(format: StorageFormat, columns: int) -> Any:
    chunk, num_sums = _CHUNK[columns], 4 * columns
    x_size = columns * chunk
    unit = LAYOUTS[format].unit
    values_per_word = 4 // format.block_bytes
    quads_per_load = values_per_word
    to_float = {StorageFormat.F32: float_of, StorageFormat.F16: float_of_half, StorageFormat.BF16: float_of_bf16}[
        format
    ]
    write = _writer(columns)

    @unroll
    def linear(  # type: ignore[no-untyped-def]
        out, x, weights, bias, num_rows, in_features, out_features, out_stride, out_offset, log2_lanes, add, has_bias
    ):
        x_chunk = cuda.shared.array(x_size, float32, 16)
        words = cuda.local.array(32, uint32)
        sums = cuda.local.array(num_sums, float32)
        thread = uint32(cuda.threadIdx.x)
        lanes = uint32(uint32(1) << log2_lanes)
        lane = uint32(thread & uint32(lanes - uint32(1)))
        stripe = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + thread) >> log2_lanes)
        first_row = uint32(uint32(cuda.blockIdx.y) * uint32(columns))
        units = uint32(uint32(in_features + uint32(unit - 1)) // uint32(unit))
        for i in range(num_sums):
            sums[i] = float32(0)

        base = uint32(0)
        while base < units:
            width = min(lanes, uint32(units - base))
            is_active = lane < width and uint32(stripe * uint32(4)) < out_features
            if is_active:
                place = uint32(uint32(stripe * units + base) * uint32(32) + lane * uint32(4))
                for i in range(8):
                    word = load_weights(weights, uint32(place + width * uint32(4 * i)))
                    for w in range(4):
                        words[4 * i + w] = word[w]

            first_column = uint32(base * uint32(unit))
            staged = uint32(first_column & uint32(chunk - 1))
            if staged == uint32(0):
                cuda.syncthreads()
                for c in range(columns):
                    _stage(x_chunk, c * chunk, x, first_row + c, first_column, num_rows, in_features, chunk)
                cuda.syncthreads()

            if is_active:
                for load in static_range(2):
                    for q in static_range(quads_per_load):
                        place = uint32(staged + (uint32(load * quads_per_load + q) * width + lane) * uint32(4))
                        for c in range(columns):
                            values = load_quad(x_chunk, uint32(place + uint32(c * chunk)))
                            for r in range(4):
                                for i in range(4):
                                    word = words[16 * load + 4 * r + (4 * q + i) // values_per_word]
                                    sums[4 * c + r] = fma(
                                        to_float(word, i % values_per_word), values[i], sums[4 * c + r]
                                    )
            base = uint32(base + lanes)

        write(
            out,
            bias,
            sums,
            stripe,
            lane,
            first_row,
            num_rows,
            out_features,
            out_stride,
            out_offset,
            log2_lanes,
            add,
            has_bias,
        )

    return linear


def _quantized(format: StorageFormat, columns: int) -> Any:
    chunk, num_sums = _CHUNK[columns], 4 * columns
    x_size, num_blocks = columns * chunk, chunk // 32
    num_block_sums = columns * num_blocks
    layout = LAYOUTS[format]
    weight_loads, words_per_unit = layout.weight_loads, 4 * layout.loads
    num_words, words_per_block = 4 * weight_loads, weight_loads // 2
    values_per_word = 32 // words_per_block
    has_minima = format is StorageFormat.Q4_1
    to_float = float_of_byte if format is StorageFormat.Q8_0 else float_of_nibble
    offset = {StorageFormat.Q8_0: 0.0, StorageFormat.Q4_0: -24.0, StorageFormat.Q4_1: -16.0}[format]
    has_offset = offset != 0
    write = _writer(columns)

    @unroll
    def linear(  # type: ignore[no-untyped-def]
        out, x, weights, bias, num_rows, in_features, out_features, out_stride, out_offset, log2_lanes, add, has_bias
    ):
        x_chunk = cuda.shared.array(x_size, float32, 16)
        x_sums = cuda.shared.array(num_block_sums, float32)
        words = cuda.local.array(num_words, uint32)
        scales = cuda.local.array(4, uint32)
        minima = cuda.local.array(4, uint32)
        sums = cuda.local.array(num_sums, float32)
        dots = cuda.local.array(num_sums, float32)
        thread = uint32(cuda.threadIdx.x)
        lanes = uint32(uint32(1) << log2_lanes)
        lane = uint32(thread & uint32(lanes - uint32(1)))
        stripe = uint32(uint32(uint32(cuda.blockIdx.x) * uint32(THREADS) + thread) >> log2_lanes)
        first_row = uint32(uint32(cuda.blockIdx.y) * uint32(columns))
        units = uint32(uint32(in_features + uint32(63)) >> uint32(6))
        for i in range(num_sums):
            sums[i] = float32(0)

        base = first_staged = uint32(0)
        while base < units:
            width = min(lanes, uint32(units - base))
            is_active = lane < width and uint32(stripe * uint32(4)) < out_features
            if is_active:
                place = uint32(uint32(stripe * units + base) * uint32(words_per_unit) + lane * uint32(4))
                for i in range(weight_loads):
                    word = load_weights(weights, uint32(place + width * uint32(4 * i)))
                    for w in range(4):
                        words[4 * i + w] = word[w]
                word = load_weights(weights, uint32(place + width * uint32(num_words)))
                for w in range(4):
                    scales[w] = word[w]
                if has_minima:
                    word = load_weights(weights, uint32(place + width * uint32(num_words + 4)))
                    for w in range(4):
                        minima[w] = word[w]

            for half in static_range(2):
                first_block = uint32(base * uint32(2) + uint32(half) * width)
                # A chunk is whole iterations or halves of one; the last iteration begins where a full one would.
                if uint32((base * uint32(2) + uint32(half) * lanes) & uint32(num_blocks - 1)) == uint32(0):
                    first_staged = first_block
                    cuda.syncthreads()
                    for c in range(columns):
                        _stage_blocks(
                            x_chunk,
                            c * chunk,
                            x_sums,
                            c * num_blocks,
                            x,
                            first_row + c,
                            first_staged * 32,
                            num_rows,
                            in_features,
                            chunk,
                        )
                    cuda.syncthreads()
                if is_active:
                    block = uint32(first_block - first_staged + lane)
                    for i in range(num_sums):
                        dots[i] = float32(0)
                    for q in static_range(8):
                        # (block % 8 ^ q) * 4 beside block * 32, as one XOR with a constant
                        place = uint32(uint32(block * uint32(32) + (block & uint32(7)) * uint32(4)) ^ uint32(4 * q))
                        for c in range(columns):
                            values = load_quad(x_chunk, uint32(place + uint32(c * chunk)))
                            for r in range(4):
                                for i in range(4):
                                    word = words[(4 * half + r) * words_per_block + (4 * q + i) // values_per_word]
                                    weight = to_float(word, (4 * q + i) % values_per_word)
                                    dots[4 * c + r] = fma(weight, values[i], dots[4 * c + r])
                    for c in static_range(columns):
                        x_sum = x_sums[uint32(block + uint32(c * num_blocks))]
                        for r in range(4):
                            scale = float_of_half(scales[2 * half + r // 2], r % 2)
                            dot = dots[4 * c + r]
                            if has_offset:
                                dot = fma(float32(offset), x_sum, dot)
                            sums[4 * c + r] = fma(scale, dot, sums[4 * c + r])
                            if has_minima:
                                minimum = float_of_half(minima[2 * half + r // 2], r % 2)
                                sums[4 * c + r] = fma(minimum, x_sum, sums[4 * c + r])
            base = uint32(base + lanes)

        write(
            out,
            bias,
            sums,
            stripe,
            lane,
            first_row,
            num_rows,
            out_features,
            out_stride,
            out_offset,
            log2_lanes,
            add,
            has_bias,
        )

    return linear


@cuda.jit(device=True, inline="always")
def _stage(x_chunk, offset, x, row, column, num_rows, in_features, size):  # type: ignore[no-untyped-def]
    """x_chunk[offset : offset + size] = x[row, column : column + size], zero beyond x."""
    place = uint32(uint32(cuda.threadIdx.x) * uint32(4))
    while place < uint32(size):
        quad = (float32(0), float32(0), float32(0), float32(0))
        if uint32(row) < num_rows and uint32(column + place) < in_features:
            quad = load_quad(x, uint32(uint32(row) * in_features + column + place))
        store_quad(x_chunk, uint32(uint32(offset) + place), quad)
        place = uint32(place + uint32(4 * THREADS))


@cuda.jit(device=True, inline="always")
def _stage_blocks(x_chunk, offset, x_sums, sums_offset, x, row, column, num_rows, in_features, size):  # type: ignore[no-untyped-def]
    """As ``_stage``, quads XOR-ed within their block of 32; and the sum of each block."""
    quad_index = uint32(cuda.threadIdx.x)
    while uint32(quad_index * uint32(4)) < uint32(size):
        quad = (float32(0), float32(0), float32(0), float32(0))
        source = uint32(uint32(column) + quad_index * uint32(4))
        if uint32(row) < num_rows and source < in_features:
            quad = load_quad(x, uint32(uint32(row) * in_features + source))
        block = uint32(quad_index >> uint32(3))
        place = uint32(uint32(offset) + (quad_index ^ (block & uint32(7))) * uint32(4))
        store_quad(x_chunk, place, quad)
        total = float32(float32(quad[0] + quad[1]) + float32(quad[2] + quad[3]))
        total += cuda.shfl_xor_sync(FULL_WARP, total, 1)
        total += cuda.shfl_xor_sync(FULL_WARP, total, 2)
        total += cuda.shfl_xor_sync(FULL_WARP, total, 4)
        if uint32(quad_index & uint32(7)) == uint32(0):
            x_sums[uint32(uint32(sums_offset) + block)] = total
        quad_index = uint32(quad_index + uint32(THREADS))


def _writer(columns: int) -> Any:
    @cuda.jit(device=True, inline="always")
    @unroll
    def write(  # type: ignore[no-untyped-def]
        out,
        bias,
        sums,
        stripe,
        lane,
        first_row,
        num_rows,
        out_features,
        out_stride,
        out_offset,
        log2_lanes,
        add,
        has_bias,
    ):
        """Sum over the lanes, and lane r < 4 writes row r of the stripe.

        The first two steps of the butterfly halve the rows a lane cares for, so that 4 sums take 6 shuffles, not 20.
        """
        is_odd, is_upper = uint32(lane & uint32(1)) != uint32(0), uint32(lane & uint32(2)) != uint32(0)
        column = uint32(stripe * uint32(4) + lane)
        is_writer = lane < uint32(4) and column < out_features
        for c in static_range(columns):
            s0, s1, s2, s3 = sums[4 * c], sums[4 * c + 1], sums[4 * c + 2], sums[4 * c + 3]
            low = select(is_odd, s1, s0) + cuda.shfl_xor_sync(FULL_WARP, select(is_odd, s0, s1), 1)
            high = select(is_odd, s3, s2) + cuda.shfl_xor_sync(FULL_WARP, select(is_odd, s2, s3), 1)
            value = select(is_upper, high, low) + cuda.shfl_xor_sync(FULL_WARP, select(is_upper, low, high), 2)
            value += cuda.shfl_xor_sync(FULL_WARP, value, 4)
            if log2_lanes > uint32(3):
                value += cuda.shfl_xor_sync(FULL_WARP, value, 8)
            if log2_lanes > uint32(4):
                value += cuda.shfl_xor_sync(FULL_WARP, value, 16)
            row = uint32(first_row + uint32(c))
            if is_writer and row < num_rows:
                place = uint32(row * out_stride + out_offset + column)
                if has_bias != uint32(0):
                    value += bias[uint32(out_offset + column)]
                if add != uint32(0):
                    value += out[place]
                out[place] = value

    return write


def linear(
    device: Device,
    out: DeviceArray,
    x: DeviceArray,
    segments: Sequence[Segment],
    bias: DeviceArray | None = None,
    *,
    add: bool = False,
) -> None:
    """out [R, out_features] = x @ weight.T (+ bias), or += with ``add``. A launch a segment of equal format."""
    num_rows, in_features = x.shape
    columns = next((columns for columns in COLUMNS if columns >= num_rows), COLUMNS[-1])
    first_feature = 0
    for segment in segments:
        lanes = lanes_for(segment.format, in_features)
        grid = -(-num_stripes(segment.num_rows) * lanes // THREADS), -(-num_rows // columns)
        arrays = [flat(out), flat(x), segment.weights, flat(x) if bias is None else bias]
        sizes = [num_rows, in_features, segment.num_rows, out.shape[1], first_feature, lanes.bit_length() - 1]
        flags = [int(add), int(bias is not None)]
        device.launch(linear_kernel(segment.format, columns), grid, [*arrays, *sizes, *flags])
        first_feature += segment.num_rows
