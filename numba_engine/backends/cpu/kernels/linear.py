"""linear: out [R, out_features] = x [R, in_features] @ weight.T (+ bias) (+ out).

Weights come in groups of 16 rows, one row a lane (see layout.py). Of few rows of x, one piece of work is some groups
times all of them, in tiles of up to 8 rows per pass over a group: read from memory once, later passes find it in L1.
Of a prompt it is two groups times a block of x, in an order that keeps both in L2 (``prompt_tile``).

Quantised weights: see quantized_dots.py.

BF16 weights, activations rounded to bf16: pair k of values goes by fma, the odd value first, to accumulator k mod 2 (a
tail of pairs mod 4 to the first), and the result is their sum. The products are exact, so vdpbf16ps and two fma give
the same bits, but for numbers below 2^-126, which the instruction takes and leaves as zero.

Otherwise float32: value k goes by fma to accumulator k mod 2 (a tail of in_features mod 4 to the first), and the
result is their sum. No order depends on R, on tiling or on threads.
Prompts in F16 reach 120 MAC/ns a core on Zen 5, 90 % of the peak of float32 fma.

Bytes moved: the weights once, x and out once (x from L2 for each group when R is large).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils

from numba_engine.backends.arrays import Array, Weight
from numba_engine.backends.cpu.commands import Command
from numba_engine.backends.cpu.compilation import inner, kernel_address
from numba_engine.backends.cpu.intrinsics import (
    LANES,
    Emitter,
    InstructionSet,
    emit,
    f32,
    i32,
    load_i64,
    pointer_i64,
    prefetch_l2,
    store_i64,
    vf16,
    vf32,
    vi32,
)
from numba_engine.backends.cpu.kernels.quantize_rows import (
    BF16,
    F32,
    INT8,
    prepare,
    prepare_rows_kernel,
    x_place,
    x_stride,
)
from numba_engine.backends.cpu.kernels.quantized_dots import Sums, accumulators, dequantized_dots, int8_dots
from numba_engine.backends.cpu.thread_team import ARGS, NUM_THREADS, announce, run
from numba_engine.formats import Format, label

if TYPE_CHECKING:
    from numba_engine.backends.cpu.backend import CpuBackend

# Arguments of a job.
_WEIGHTS, _GROUP_BYTES, _SCALE_BYTES, _IN_FEATURES, _NUM_ROWS = 0, 1, 2, 3, 4
_X, _X_STRIDE, _R, LINEAR_OUT, LINEAR_OUT_STRIDE, _BIAS, _ADD = 5, 6, 7, 8, 9, 10, 11
_BLOCK_ROWS, _PANEL_PAIRS = 12, 13
NUM_LINEAR_ARGS = 16

PROMPT_ROWS = 16  # from so many rows of x on, weights are read more than once and x is cut as well
MOST_BLOCK_ROWS = 128
_ITEMS_A_THREAD = 8  # or more, so that threads end together
_BLOCK_BYTES = 1 << 18  # of x, that stay in L2 while a panel of weights passes
_PANEL_BYTES = 1 << 18  # of weights, that stay in L2 while all of x passes

_MIN_PIECE_BYTES = 12_000
# Ahead in the stream, to L1. Times of a group on Zen 5: none +30 %, 2 KB +40 to 60 %, 4 KB +5 to 25 %, 12 to 24 KB up
# to +10 %, to L2 +5 to 20 %. Leaving out the scales, which no hardware prefetcher finds, cost 20 to 40 %.
_PREFETCH_BYTES = 8192
_PREFETCH_STEP = 256

prefetch = prefetch_l2(_PREFETCH_STEP)

# Fields of a row of a weight's table, one row a segment. NEXT: where the weight begins that is used after this one, and
# how many bytes of it are read from there on in order.
TABLE_FIELDS = 9
KERNEL, WEIGHTS, GROUP_BYTES, SCALE_BYTES, NUM_ROWS, FIRST_ROW, X_FORM, NEXT, NEXT_BYTES = range(TABLE_FIELDS)


@functools.cache
def linear_kernel(format: Format, x_form: int, isa: InstructionSet) -> int:
    """Address of the kernel for weights of this format. ``isa`` matters unless x is float32."""
    tile8, tile4, tile2, tile1 = (_tile(format, x_form, isa, n, 1) for n in (8, 4, 2, 1))
    double4 = _tile(format, x_form, isa, 4, 2)

    def linear_items(begin: int, end: int, args: int) -> None:
        in_features, num_rows, r = load_i64(args, _IN_FEATURES), load_i64(args, _NUM_ROWS), load_i64(args, _R)
        x_stride, out_stride = load_i64(args, _X_STRIDE), load_i64(args, LINEAR_OUT_STRIDE)
        bias, add = load_i64(args, _BIAS), load_i64(args, _ADD)
        scale_bytes, group_bytes = load_i64(args, _SCALE_BYTES), load_i64(args, _GROUP_BYTES)
        for item in range(begin, end):
            first, last, t, count = item, item + 1, 0, r
            if r >= PROMPT_ROWS:
                first, last, t, count = prompt_tile(args, item)
            x = load_i64(args, _X) + t * x_stride
            out = load_i64(args, LINEAR_OUT) + t * out_stride
            weights = load_i64(args, _WEIGHTS) + first * group_bytes
            if last == first + 2:
                # Two groups share the loads of x; meanwhile the next two are asked for.
                row = first * LANES
                ahead = weights + 2 * group_bytes
                step = 2 * group_bytes // (count // 4 + 1) + 1
                while count >= 4:
                    for at in range(ahead, ahead + step, _PREFETCH_STEP):
                        prefetch(at)
                    ahead += step
                    double4(
                        weights, group_bytes, scale_bytes, in_features, x, x_stride, out + row * 4, out_stride,
                        bias + row * 4 if bias else 0, add, num_rows - row,
                    )  # fmt: skip
                    x += 4 * x_stride
                    out += 4 * out_stride
                    count -= 4
            for group in range(first, last):
                weights = load_i64(args, _WEIGHTS) + group * group_bytes
                row = group * LANES
                group_bias = bias + row * 4 if bias else 0
                lanes = num_rows - row
                from_x, to, left = x, out + row * 4, count
                while left >= 8:
                    tile8(
                        weights, 0, scale_bytes, in_features, from_x, x_stride, to, out_stride, group_bias, add, lanes
                    )
                    from_x += 8 * x_stride
                    to += 8 * out_stride
                    left -= 8
                if left >= 4:
                    tile4(
                        weights, 0, scale_bytes, in_features, from_x, x_stride, to, out_stride, group_bias, add, lanes
                    )
                    from_x += 4 * x_stride
                    to += 4 * out_stride
                    left -= 4
                if left >= 2:
                    tile2(
                        weights, 0, scale_bytes, in_features, from_x, x_stride, to, out_stride, group_bias, add, lanes
                    )
                    from_x += 2 * x_stride
                    to += 2 * out_stride
                    left -= 2
                if left:
                    tile1(
                        weights, 0, scale_bytes, in_features, from_x, x_stride, to, out_stride, group_bias, add, lanes
                    )

    kind = "f32" if x_form == F32 else f"{'int8' if x_form == INT8 else 'bf16'}-{isa}"
    return kernel_address(linear_items, "void(int64, int64, int64)", f"{label(format)}-{kind}")


@inner
def write_linear_args(
    team: np.ndarray, at: int, table: np.ndarray, segment: int, x: int, prepared: int, in_features: int,
    num_x_rows: int, out: int, out_stride: int, bias: int, add: int,
) -> None:  # fmt: skip
    """One segment's job, to word ``at`` of the arguments. Addresses and strides in bytes; ``bias`` 0 for none."""
    t = table[segment]
    form = t[X_FORM]
    stride = x_stride(form, in_features)
    at += ARGS
    team[at + _WEIGHTS] = t[WEIGHTS]
    team[at + _GROUP_BYTES] = t[GROUP_BYTES]
    team[at + _SCALE_BYTES] = t[SCALE_BYTES]
    team[at + _IN_FEATURES] = in_features
    team[at + _NUM_ROWS] = t[NUM_ROWS]
    team[at + _X] = x_place(form, x, prepared, in_features, num_x_rows)
    team[at + _X_STRIDE] = stride
    team[at + _R] = num_x_rows
    team[at + LINEAR_OUT] = out + t[FIRST_ROW] * 4
    team[at + LINEAR_OUT_STRIDE] = out_stride
    team[at + _BIAS] = bias + t[FIRST_ROW] * 4 if bias else 0
    team[at + _ADD] = add
    block_rows = min(max(PROMPT_ROWS, _BLOCK_BYTES // stride // 4 * 4), MOST_BLOCK_ROWS)
    blocks = (num_x_rows + block_rows - 1) // block_rows
    pairs = (t[NUM_ROWS] + 2 * LANES - 1) // (2 * LANES)
    wanted = (_ITEMS_A_THREAD * team[NUM_THREADS] + pairs - 1) // pairs
    blocks = max(blocks, min(wanted, num_x_rows // PROMPT_ROWS))
    team[at + _BLOCK_ROWS] = ((num_x_rows + blocks - 1) // blocks + 3) // 4 * 4
    team[at + _PANEL_PAIRS] = max(1, _PANEL_BYTES // (2 * t[GROUP_BYTES]))


@inner
def cut_rows(args: int, first: int, num_rows: int) -> None:
    """Of the job at ``args``, keep the rows of weights from ``first``, a multiple of 16, on."""
    store_i64(args, _WEIGHTS, load_i64(args, _WEIGHTS) + first // LANES * load_i64(args, _GROUP_BYTES))
    store_i64(args, LINEAR_OUT, load_i64(args, LINEAR_OUT) + first * 4)
    store_i64(args, _NUM_ROWS, num_rows)


@inner
def cut_alike(args: int, others: int) -> None:
    """Give two jobs over as many rows of weights the same items, those of the job at ``args``."""
    store_i64(others, _BLOCK_ROWS, load_i64(args, _BLOCK_ROWS))
    store_i64(others, _PANEL_PAIRS, load_i64(args, _PANEL_PAIRS))


@inner
def num_items(num_rows: int, num_x_rows: int, args: int) -> int:
    """Items of a job over ``num_rows`` rows of weights: groups, or for prompts blocks of x times pairs of groups."""
    groups = (num_rows + LANES - 1) // LANES
    if num_x_rows < PROMPT_ROWS:
        return groups
    block_rows = load_i64(args, _BLOCK_ROWS)
    return (groups + 1) // 2 * ((num_x_rows + block_rows - 1) // block_rows)


@inner
def min_piece(table: np.ndarray, segment: int, num_x_rows: int) -> int:
    """Items that are worth a thread's while: about a microsecond's."""
    return max(1, _MIN_PIECE_BYTES // (table[segment, GROUP_BYTES] * num_x_rows))


@inner
def prompt_tile(args: int, item: int) -> Any:
    """First group, the one after the last, first row of x, and number of rows.

    In the order of items a panel of weights meets block after block of x, and a block pair after pair of the panel.
    """
    r, block_rows, panel = load_i64(args, _R), load_i64(args, _BLOCK_ROWS), load_i64(args, _PANEL_PAIRS)
    groups = (load_i64(args, _NUM_ROWS) + LANES - 1) // LANES
    pairs = (groups + 1) // 2
    blocks = (r + block_rows - 1) // block_rows
    before = item // (panel * blocks) * panel
    rest = item - before * blocks
    width = min(panel, pairs - before)
    t = rest // width * block_rows
    first = 2 * (before + rest % width)
    return first, min(first + 2, groups), t, min(block_rows, r - t)


def launch(backend: CpuBackend, out: Array, x: Array, weight: Weight, bias: Array | None = None) -> None:
    multiply_by(backend, out, x, weight, bias, add=False)


def multiply_by(backend: CpuBackend, out: Array, x: Array, weight: Weight, bias: Array | None, *, add: bool) -> None:
    table = backend.segment_table(weight)
    backend.call(
        linear, prepare_rows_kernel(), table, len(table), out, out.shape[1], x, *x.shape,
        bias, add, backend.prepared(*x.shape),
    )  # fmt: skip


@Command
def linear(
    team: np.ndarray, prepare_rows: int, table: int, num_segments: int, out: int, out_features: int, x: int,
    num_x_rows: int, in_features: int, bias: int, add: int, prepared: int,
) -> None:  # fmt: skip
    """out [R, out_features] = (out +) x [R, in_features] @ weight.T + bias. ``prepared``: room for x in other forms."""
    segments = segment_table(table, num_segments)
    prepare(team, prepare_rows, x_forms(segments), prepared, x, in_features, num_x_rows)
    multiply(team, segments, out, out_features, x, prepared, in_features, num_x_rows, bias, add)


@inner
def segment_table(address: int, num_segments: int) -> np.ndarray:
    return carray(pointer_i64(address), (num_segments, TABLE_FIELDS))


@inner
def x_forms(table: np.ndarray) -> int:
    """The forms of x that the segments take, or'ed."""
    forms = 0
    for segment in range(table.shape[0]):
        forms |= table[segment, X_FORM]
    return forms


@inner
def multiply(
    team: np.ndarray, table: np.ndarray, out: int, out_features: int, x: int, prepared: int, in_features: int,
    num_x_rows: int, bias: int, add: int,
) -> None:  # fmt: skip
    """All segments of a weight. ``prepared`` holds x in the forms that segments take."""
    announce(team, table[0, NEXT], table[0, NEXT_BYTES])
    for segment in range(table.shape[0]):
        write_linear_args(
            team, 0, table, segment, x, prepared, in_features, num_x_rows, out, 4 * out_features, bias, add
        )
        items = num_items(table[segment, NUM_ROWS], num_x_rows, team.ctypes.data + 8 * ARGS)
        run(team, table[segment, KERNEL], items, min_piece(table, segment, num_x_rows))


def _tile(format: Format, x_form: int, isa: InstructionSet, rows: int, groups: int) -> Any:
    """Intrinsic: groups of weights times rows of x, stored. ``lanes``: rows of weights from here on."""

    def body(
        b: ir.IRBuilder, weights: ir.Value, group_bytes: ir.Value, scale_bytes: ir.Value, in_features: ir.Value,
        x: ir.Value, x_stride: ir.Value, out: ir.Value, out_stride: ir.Value, bias: ir.Value, add: ir.Value,
        lanes: ir.Value,
    ) -> None:  # fmt: skip
        e = Emitter(b, isa)
        xs = [e.at(x, b.mul(x_stride, e.integer(i))) for i in range(rows)]
        ws = [weights, b.add(weights, group_bytes)][:groups]
        if x_form == BF16:
            sums = _bf16_dots(e, ws, in_features, xs)
        elif x_form == INT8:
            sums = int8_dots(e, format, ws, scale_bytes, in_features, xs, _PREFETCH_BYTES)
        elif format.is_quantized:
            sums = dequantized_dots(e, format, ws, scale_bytes, in_features, xs)
        else:
            sums = _float_dots(e, format, ws, in_features, xs)
        for g, of_group in enumerate(sums):
            mask = e.first_lanes(b.sub(lanes, e.integer(g * LANES)))
            bias_values = cgutils.alloca_once(b, vf32)
            b.store(ir.Constant(vf32, None), bias_values)
            with b.if_then(b.icmp_signed("!=", bias, e.integer(0))):
                b.store(e.masked_load(e.at(bias, g * LANES * 4), vf32, mask, 4), bias_values)
            for i, total in enumerate(of_group):
                address = e.at(e.at(out, b.mul(out_stride, e.integer(i))), g * LANES * 4)
                total = b.fadd(total, b.load(bias_values))
                with b.if_else(b.icmp_signed("!=", add, e.integer(0))) as (then, otherwise):
                    with then:
                        e.masked_store(b.fadd(e.masked_load(address, vf32, mask, 4), total), address, mask, 4)
                    with otherwise:
                        e.masked_store(total, address, mask, 4)

    return emit(f"tile_{label(format)}_{rows}x{groups}", types.void, 11, body)


def _float_dots(e: Emitter, format: Format, weights: list[ir.Value], in_features: ir.Value, xs: list[ir.Value]) -> Sums:
    b = e.b
    totals = [[accumulators(e, 2) for _ in xs] for _ in weights]
    width = format.block_bytes * LANES

    def step(k: ir.Value, j: int, parity: int) -> None:
        values = [_widened(e, format, w, k, j) for w in weights]
        for t, x in enumerate(xs):
            element = e.splat(e.load(e.at(e.at(x, k, 4), 4 * j), f32, 4))
            for value, places in zip(values, totals, strict=True):
                place = places[t][parity]
                b.store(e.fma(value, element, b.load(place)), place)

    quads = b.lshr(in_features, e.integer(2))
    with e.loop(quads) as quad:
        k = b.shl(quad, e.integer(2))
        if len(weights) == 1:
            e.prefetch(e.at(e.at(weights[0], k, width), _PREFETCH_BYTES), 4 * width)
        for j in range(4):
            step(k, j, j % 2)
    with e.loop(b.and_(in_features, e.integer(3))) as tail:
        step(b.add(b.shl(quads, e.integer(2)), tail), 0, 0)
    return [[b.fadd(b.load(even), b.load(odd)) for even, odd in places] for places in totals]


def _bf16_dots(e: Emitter, weights: list[ir.Value], in_features: ir.Value, xs: list[ir.Value]) -> Sums:
    b = e.b
    totals = [[accumulators(e, 2) for _ in xs] for _ in weights]
    pair_bytes = 4 * LANES

    def step(pair: ir.Value, j: int) -> None:
        values = [e.load(e.at(e.at(w, pair, pair_bytes), j * pair_bytes), vi32, 64) for w in weights]
        for t, x in enumerate(xs):
            both = e.splat(e.load(e.at(e.at(x, pair, 4), 4 * j), i32, 4))
            for value, places in zip(values, totals, strict=True):
                place = places[t][j % 2]
                b.store(e.dot2(b.load(place), value, both), place)

    pairs = b.lshr(b.add(in_features, e.integer(1)), e.integer(1))
    quads = b.lshr(pairs, e.integer(2))
    with e.loop(quads) as quad:
        pair = b.shl(quad, e.integer(2))
        if len(weights) == 1:
            e.prefetch(e.at(e.at(weights[0], pair, pair_bytes), _PREFETCH_BYTES), 4 * pair_bytes)
        for j in range(4):
            step(pair, j)
    with e.loop(b.and_(pairs, e.integer(3))) as tail:
        step(b.add(b.shl(quads, e.integer(2)), tail), 0)
    return [[b.fadd(b.load(even), b.load(odd)) for even, odd in places] for places in totals]


def _widened(e: Emitter, format: Format, weights: ir.Value, k: ir.Value, j: int) -> ir.Value:
    """Value k + j of 16 rows."""
    b = e.b
    if format.float_type == "bf16":
        k = e.at(k, j)
        pair = e.load(e.at(weights, b.lshr(k, e.integer(1)), 4 * LANES), vi32, 64)
        left = b.shl(b.and_(b.not_(k), e.integer(1)), e.integer(4))
        bits = b.shl(pair, e.splat(b.trunc(left, i32)))
        return b.bitcast(b.and_(bits, e.const(vi32, -65536)), vf32)
    address = e.at(e.at(weights, k, format.block_bytes * LANES), j * format.block_bytes * LANES)
    if format.float_type == "f32":
        return e.load(address, vf32, 64)
    return b.fpext(e.load(address, vf16, 32), vf32)
