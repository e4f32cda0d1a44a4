"""streaming: the loop in which a weight is read and multiplied, shared by ``linear`` and the fused phases.

A block of 8 warps makes two tiles of 16 outputs for up to ``tokens`` rows of x. Which two, what x is and what happens
to the outputs are the kernel's own: ``tiles_of``, ``read`` and ``finish``, functions that are inlined here.

Who does what. The columns are cut into 8 contiguous slices, by nothing but their number, and each warp streams its
slice of both tiles: it never waits for another until its sums are done. Then the 8 sums of every output are added in
the warps' order, through shared memory. So an output is the same operations in the same order whatever runs beside it.

In flight. A ring of ``depth`` steps in registers: while one is multiplied, the loads of the others are on their way,
and those of the first steps are issued before x is looked at. The loads are volatile, so they stay in this order, and
they go past L1. A block that has several pairs of tiles to do keeps its x in shared memory, and asks for the next
pair's first steps before it adds up this one.

What it comes to for one row of x (machine code, cc 9.0; reckoned, not yet timed on a GPU):

=======  ==============  =========  =================  ======================================
format   instructions a  registers  bytes in flight    32 outputs of 4096 columns: warp
         weight, loop    a thread   a multiprocessor   instructions a byte; a clock, of 4
=======  ==============  =========  =================  ======================================
BF16     0.7             122        102 KB             0.02; 0.4
Q8_0     1.1             102        72 KB              0.06; 1.2
Q4_0     1.4             109        67 KB              0.12; 2.6
Q4_1     1.7             125        90 KB              0.13; 2.7
=======  ==============  =========  =================  ======================================

16 warps are resident; a clock is one in which an H200 moves its 20 bytes a multiprocessor. Staging takes a warp about
95 instructions for 128 columns (BF16: 40), a third of the last column's; over several pairs of tiles it is shared.

Staging. A warp stages its own columns of x, 1024 columns × tokens at a time, in the form that the tensor cores take
(``planes.py``); nobody else reads them, so it needs no barrier of the block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.cuda.types import float32, uint32, uint64

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.device import Device
from numba_engine.backends.cuda.kernels.float_planes import float_planes
from numba_engine.backends.cuda.kernels.int8_planes import int8_planes
from numba_engine.backends.cuda.kernels.intrinsics import as_bits, as_float, load_quad, multiply, prefetch
from numba_engine.backends.cuda.kernels.planes import Planes
from numba_engine.backends.cuda.kernels.reductions import inverse_rms, sum_of_squares
from numba_engine.backends.cuda.kernels.unrolling import static_range
from numba_engine.formats import Format

THREADS = 256
WARPS = THREADS // 32
MIN_BLOCKS = 2
"""Blocks of a multiprocessor, at least: 16 warps, each with several KB in flight."""
TOKENS = (1, 4, 8, 16)
"""Rows of x that one pass over the weights serves."""
AHEAD_BYTES = 4 << 20
"""Of the next weight, asked for before its kernel begins: what memory delivers in the microsecond between two kernels,
and a tenth of the smallest L2 this is for (A100)."""
_NONE = 0xFFFFFFFF


def ahead_of(next_weights: Array | None, otherwise: Array, num_rows: int) -> tuple[Array, int]:
    """What a kernel asks L2 for when it is done, and how many lines of 128 bytes; 0 after anything but a short step."""
    if next_weights is None or num_rows > TOKENS[-1]:
        return otherwise, 0
    return next_weights, min(next_weights.nbytes, AHEAD_BYTES) // 128


def stream_grid(device: Device, num_pairs: int, num_rows: int, tokens: int) -> tuple[int, int]:
    """As many blocks as are resident at once, each with as many pairs of tiles as any other, or one fewer."""
    pairs_per_block = -(-num_pairs // (MIN_BLOCKS * device.multiprocessors))
    return -(-num_pairs // pairs_per_block), -(-num_rows // tokens)


def tokens_for(num_rows: int) -> int:
    return next((tokens for tokens in TOKENS if tokens >= num_rows), TOKENS[-1])


def planes_of(format: Format, tokens: int, read: Any) -> Planes:
    return (int8_planes if format.is_quantized else float_planes)(format, tokens, read)


@cuda.jit(device=True, inline="always")
def read_plain(memory, x, source, token, first_row, num_rows, column):  # type: ignore[no-untyped-def]
    """x[row, column : column + 4], zero beyond its rows. ``source`` is (in_features,)."""
    quad = (float32(0), float32(0), float32(0), float32(0))
    row = uint32(first_row + token)
    if row < num_rows:
        quad = load_quad(x, uint32(row * source[0] + column))
    return quad


@cuda.jit(device=True, inline="always")
def own_row(norm, row):  # type: ignore[no-untyped-def]
    return row


@cuda.jit(device=True, inline="always")
def listed_row(norm, row):  # type: ignore[no-untyped-def]
    return uint32(norm[2][row])


def _normed(row_of: Any) -> Any:
    @cuda.jit(device=True, inline="always")
    def read(memory, x, source, token, first_row, num_rows, column):  # type: ignore[no-untyped-def]
        """As ``read_plain``, of the RMSNorm of x. ``source`` is (in_features, norm, where the 1/rms are)."""
        quad = (float32(0), float32(0), float32(0), float32(0))
        row = uint32(first_row + token)
        if row < num_rows:
            norm = source[1]
            scale = as_float(memory[uint32(source[2] + token)])
            v = load_quad(x, uint32(row_of(norm, row) * source[0] + column))
            w = load_quad(norm[0], column)
            quad = (
                multiply(multiply(v[0], scale), w[0]),
                multiply(multiply(v[1], scale), w[1]),
                multiply(multiply(v[2], scale), w[2]),
                multiply(multiply(v[3], scale), w[3]),
            )
        return quad

    return read


def stream(
    format: Format,
    tokens: int,
    tiles_of: Callable[..., Any],
    finish: Callable[..., None],
    *,
    is_normed: bool = False,
    is_gathered: bool = False,
) -> Any:
    """The body of a kernel.

    tiles_of(pair, shape) gives the two tiles of a pair, and finish(arguments, pair, row, token, a, b) takes outputs
    ``row`` of both, for row ``token`` of x. For ``is_normed`` what is multiplied is the RMSNorm of x, and ``norm`` is
    (norm weight, eps), for ``is_gathered`` also the rows of x that are wanted. When a block is done it asks L2 for its
    share of the first ``num_lines`` lines of ``ahead``, so that memory has work while the last blocks finish and the
    next kernel starts.
    """
    row_of = listed_row if is_gathered else own_row
    read = _normed(row_of) if is_normed else read_plain
    planes = planes_of(format, tokens, read)
    depth = 4 if tokens <= 4 and planes.tile_words <= 8 else 2  # what the registers hold
    step_bytes, set_words = 4 * planes.step_words, 2 * planes.tile_words
    ring_words, num_sums = depth * set_words, planes.num_sums
    steps_per_unit, step_columns, chunk_steps = 64 // planes.step, planes.step, planes.chunk_steps
    groups, outputs = max(tokens // 4, 1), 16 * tokens
    staged_words = planes.staged_words
    keeps_x = tokens < TOKENS[-1]  # else the partial sums take x's place
    partials_at, partials_stride = (WARPS * staged_words, 2 * outputs) if keeps_x else (0, staged_words)
    norms_at = WARPS * staged_words + (WARPS * 2 * outputs if keeps_x else 0)
    memory_words = norms_at + (9 * tokens if is_normed else 0)
    places, load, prepare = planes.places, planes.load, planes.prepare
    stage, multiply_step, total = planes.stage, planes.multiply, planes.total
    del planes
    is_single, token_mask = tokens == 1, min(tokens, 4) - 1

    @cuda.jit(device=True, forceinline=True)
    def normalise(memory, x, norm, size, first_row, num_rows, thread):  # type: ignore[no-untyped-def]
        """1/rms of every token to memory[norms_at : norms_at + tokens]."""
        for token in range(tokens):
            row = uint32(first_row + uint32(token))
            if row < num_rows:
                squares = sum_of_squares(x, uint32(row_of(norm, row) * size), size)
                if uint32(thread & uint32(31)) == uint32(0):
                    to = uint32(uint32(norms_at + tokens + 8 * token) + (thread >> uint32(5)))
                    memory[to] = as_bits(squares)
        cuda.syncthreads()
        if thread < uint32(tokens) and uint32(first_row + thread) < num_rows:
            first = uint32(uint32(norms_at + tokens) + thread * uint32(8))
            memory[uint32(uint32(norms_at) + thread)] = as_bits(inverse_rms(memory, first, size, norm[1]))
        cuda.syncthreads()

    def body(x, norm, weights, num_rows, in_features, num_pairs, shape, arguments, ahead, num_lines):  # type: ignore[no-untyped-def]
        memory = cuda.shared.array(memory_words, uint32, 16)
        ring = cuda.local.array(ring_words, uint32)
        sums = cuda.local.array(num_sums, float32)
        thread = uint32(cuda.threadIdx.x)
        warp, lane = uint32(thread >> uint32(5)), uint32(thread & uint32(31))
        units = uint32(uint32(in_features + uint32(63)) >> uint32(6))
        first_unit = uint32(uint32(warp * units) >> uint32(3))
        end_unit = uint32(uint32(warp * units + units) >> uint32(3))
        steps = uint32(uint32(end_unit - first_unit) * uint32(steps_per_unit))
        first_column = uint32(first_unit * uint32(64))
        end_column = min(in_features, uint32(end_unit * uint32(64)))
        first_row = uint32(uint32(cuda.blockIdx.y) * uint32(tokens))
        base = uint32(warp * uint32(staged_words))

        pair = uint32(cuda.blockIdx.x)
        tile_a, tile_b = tiles_of(pair, shape)
        places_a = places(weights, uint32(tile_a * units + first_unit), lane)
        places_b = places(weights, uint32(tile_b * units + first_unit), lane)
        for j in static_range(depth - 1):
            if uint32(j) < steps:
                skip = uint64(step_bytes * j)
                load(ring, set_words * j, 0, places_a, skip)
                load(ring, set_words * j, 1, places_b, skip)
        if is_normed:
            normalise(memory, x, norm, in_features, first_row, num_rows, thread)
            source = (in_features, norm, uint32(norms_at))
        else:
            source = (in_features,)  # type: ignore[assignment]
        prepare(memory, base, x, source, first_row, num_rows, first_column, end_column, lane)

        staged = uint32(_NONE)
        while pair < num_pairs:
            for i in range(num_sums):
                sums[i] = float32(0)
            chunk = uint32(0)
            while chunk < steps:
                end = min(steps, uint32(chunk + uint32(chunk_steps)))
                if chunk != staged:
                    cuda.syncwarp()
                    column = uint32(first_column + chunk * uint32(step_columns))
                    count = uint32(end - chunk)
                    stage(memory, base, x, source, first_row, num_rows, column, end_column, count, lane)
                    cuda.syncwarp()
                    staged = chunk
                step = chunk
                while step < end:
                    for j in static_range(depth):
                        if step < end:
                            coming = uint32(step + uint32(depth - 1))
                            if coming < steps:
                                at = set_words * ((j + depth - 1) % depth)
                                skip = uint64(coming) * uint64(step_bytes)
                                load(ring, at, 0, places_a, skip)
                                load(ring, at, 1, places_b, skip)
                            multiply_step(sums, ring, set_words * j, memory, base, uint32(step - chunk), j % 2, lane)
                            step = uint32(step + uint32(1))
                chunk = end

            this = pair
            pair = uint32(pair + uint32(cuda.gridDim.x))
            if pair < num_pairs:
                tile_a, tile_b = tiles_of(pair, shape)
                places_a = places(weights, uint32(tile_a * units + first_unit), lane)
                places_b = places(weights, uint32(tile_b * units + first_unit), lane)
                for j in static_range(depth - 1):
                    if uint32(j) < steps:
                        skip = uint64(step_bytes * j)
                        load(ring, set_words * j, 0, places_a, skip)
                        load(ring, set_words * j, 1, places_b, skip)

            if not keeps_x:
                cuda.syncwarp()
                staged = uint32(_NONE)
            own = uint32(uint32(partials_at) + warp * uint32(partials_stride))
            for tile in static_range(2):
                for group in static_range(groups):
                    for half in static_range(2):
                        token = uint32(uint32(4 * group) + (lane & uint32(token_mask)))
                        value = as_bits(total(sums, tile, group, half, memory, base, token))
                        if is_single:
                            if uint32(lane & uint32(3)) == uint32(0):
                                memory[uint32(own + uint32(16 * tile + 8 * half) + (lane >> uint32(2)))] = value
                        else:
                            memory[uint32(own + uint32(outputs * tile + 64 * group + 32 * half) + lane)] = value
            cuda.syncthreads()
            if thread < uint32(outputs):
                row, token = thread, uint32(0)
                if not is_single:
                    row = uint32(uint32(thread & uint32(63)) >> uint32(2))
                    token = uint32(uint32(thread >> uint32(6)) * uint32(4) + (thread & uint32(3)))
                token = uint32(first_row + token)
                if token < num_rows:
                    a = b = float32(0)
                    for w in range(WARPS):
                        place = uint32(uint32(partials_at + partials_stride * w) + thread)
                        a += as_float(memory[place])
                        b += as_float(memory[uint32(place + uint32(outputs))])
                    finish(arguments, this, row, token, a, b)
            cuda.syncthreads()

        share = uint32(uint32(num_lines + uint32(cuda.gridDim.x - 1)) // uint32(cuda.gridDim.x))
        i = thread
        while i < share:
            line = uint32(uint32(cuda.blockIdx.x) * share + i)
            if line < num_lines:
                prefetch(ahead, uint32(line * uint32(32)))
            i = uint32(i + uint32(THREADS))

    return body
