"""The inner loops of linear over quantised weights: 16 rows of weights, one a lane, times rows of x.

All derives from the descriptor: w = d·s·(T[q] − zero) + m, with codes q, coarse scales d, fine scales s and minima m
where layout.py says that they lie.

Activations as integers (q_x = 256 high + low, see quantize_rows.py), per 32 values:

    scales per 32:   dot = Σ (T[q] − zero)·q_x, exact in int32;   acc = fma(d·s, float(dot)·d_x, acc)
    fine per 16:     H, L = Σ_r s_r·dot_r of high and of low, exact;   dot = fma(float(H), 256, float(L));
                     acc = fma(d, dot·d_x, acc)
    minima per 32:   acc = fma(m, d_x·Σ q_x, acc)
    minima per 16:   acc = fma(dmin, float(Σ_r m_r·Σ q_x)·d_x, acc)

T[q] are unsigned bytes; dots start at −zero·Σ q_x. High and low go apart to fine scales, since together they overflow.

Activations in float32: value k goes by fma to accumulator k mod 2, and the result is their sum.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from llvmlite import ir
from numba.core import cgutils

from numba_engine.backends.cpu.intrinsics import LANES, Emitter, f32, i8, i16, i32, vf16, vf32, vi8x64, vi32
from numba_engine.backends.cpu.layout import CHUNK, BlockLayout, block_layout
from numba_engine.formats import Format, Scales

Sums = list[list[ir.Value]]
"""One vector of 16 results for each group and row of x."""

_QUARTERS = 8
"""Vectors of [16 rows][4] codes in a chunk."""


def accumulators(e: Emitter, count: int) -> list[ir.Value]:
    """Places of vectors of zeros."""
    places = []
    for _ in range(count):
        place = cgutils.alloca_once(e.b, vf32)
        e.b.store(ir.Constant(vf32, None), place)
        places.append(place)
    return places


def int8_dots(
    e: Emitter,
    format: Format,
    weights: list[ir.Value],
    scale_bytes: ir.Value,
    in_features: ir.Value,
    xs: list[ir.Value],
    prefetch_bytes: int,
) -> Sums:
    """``prefetch_bytes``: how far ahead in the stream weights are asked for; by no more than one group at a time."""
    b, layout = e.b, block_layout(format)
    num_chunks = b.lshr(in_features, e.integer(5))
    totals = [accumulators(e, len(xs)) for _ in weights]
    # By share of the group, so that its coarse scales are asked for too.
    chunk_share = -(-(layout.coarse_bytes + layout.block_bytes) // layout.chunks)
    with _each_chunk(e, format, weights, scale_bytes, in_features) as (index, chunks):
        if len(weights) == 1:
            e.prefetch(e.at(e.at(weights[0], prefetch_bytes), index, chunk_share), chunk_share)
        for t, x in enumerate(xs):
            of_x = _QuantizedX(e, x, in_features, num_chunks, index)
            for chunk, dot, places in zip(chunks, _dots(e, layout, chunks, of_x), totals, strict=True):
                scaled = b.fmul(dot, e.splat(of_x.scale()))
                total = e.fma(chunk.scales.shared, scaled, b.load(places[t]))
                if chunk.minima:
                    total = e.fma(chunk.minima.shared, _scaled_sum(e, chunk.minima.fine, of_x), total)
                b.store(total, places[t])
    return [[b.load(place) for place in places] for places in totals]


def dequantized_dots(
    e: Emitter,
    format: Format,
    weights: list[ir.Value],
    scale_bytes: ir.Value,
    in_features: ir.Value,
    xs: list[ir.Value],
) -> Sums:
    b, layout = e.b, block_layout(format)
    totals = [[accumulators(e, 2) for _ in xs] for _ in weights]
    with _each_chunk(e, format, weights, scale_bytes, in_features) as (index, chunks):
        for chunk, places in zip(chunks, totals, strict=True):
            for k, quarter in enumerate(chunk.codes):
                words = b.bitcast(quarter, vi32)
                scale = chunk.scales.of_quarter(e, k)
                for j in range(4):
                    byte = b.and_(b.lshr(words, e.const(vi32, 8 * j)), e.const(vi32, 255))
                    value = b.fmul(scale, b.sitofp(b.sub(byte, e.const(vi32, layout.zero)), vf32))
                    if chunk.minima:
                        value = b.fadd(value, chunk.minima.of_quarter(e, k))
                    for x, two in zip(xs, places, strict=True):
                        element = e.load(e.at(e.at(x, index, 4 * CHUNK), 4 * (4 * k + j)), f32, 4)
                        b.store(e.fma(value, e.splat(element), b.load(two[j % 2])), two[j % 2])
    return [[b.fadd(b.load(even), b.load(odd)) for even, odd in places] for places in totals]


@dataclass(frozen=True)
class _ChunkScales:
    """The scales, or minima, of 32 values: ``shared`` by all, times one of ``fine`` where runs have their own."""

    shared: ir.Value
    """[16 rows] float32"""
    fine: list[ir.Value]
    """[16 rows] int32 each; empty where the values have one scale."""

    def of_quarter(self, e: Emitter, quarter: int) -> ir.Value:
        if not self.fine:
            return self.shared
        fine = self.fine[quarter * len(self.fine) // _QUARTERS]
        return e.b.fmul(self.shared, e.b.sitofp(fine, vf32))


@dataclass(frozen=True)
class _Chunk:
    """32 values of 16 rows of weights."""

    scales: _ChunkScales
    minima: _ChunkScales | None
    codes: list[ir.Value]
    """8 vectors [16 rows][4] of unsigned bytes T[q], in the order of values."""


@contextlib.contextmanager
def _each_chunk(
    e: Emitter, format: Format, weights: list[ir.Value], scale_bytes: ir.Value, in_features: ir.Value
) -> Iterator[tuple[ir.Value, list[_Chunk]]]:
    """A loop over the chunks of a row: number of the chunk, and the chunk of each group of weights."""
    b, layout = e.b, block_layout(format)
    kinds = [scales for scales in (format.scales, format.minima) if scales]
    with e.loop(b.udiv(in_features, e.integer(format.block_size))) as block:
        coarse = [_coarse(e, kinds, e.at(w, block, layout.coarse_bytes)) for w in weights]
        inner = e.loop(e.integer(layout.chunks)) if layout.chunks > 1 else contextlib.nullcontext(e.integer(0))
        with inner as within:
            chunks = []
            for w, shared in zip(weights, coarse, strict=True):
                stream = e.at(e.at(w, scale_bytes), block, layout.block_bytes)
                fine = e.at(stream, within, layout.fine_chunk_bytes)
                scales = _chunk_scales(e, shared[0], fine, layout.fine_scales)
                fine = e.at(fine, LANES * layout.fine_scales)
                minima = _chunk_scales(e, shared[1], fine, layout.fine_minima) if format.minima else None
                codes = _codes(e, layout, e.at(e.at(stream, layout.fine_bytes), within, layout.chunk_bytes))
                chunks.append(_Chunk(scales, minima, codes))
            yield e.at(within, block, layout.chunks), chunks


def _coarse(e: Emitter, kinds: list[Scales], address: ir.Value) -> list[ir.Value]:
    """Coarse scales and minima of a block, the sign of its format applied."""
    values = []
    for i, scales in enumerate(kinds):
        value = e.b.fpext(e.load(e.at(address, 2 * LANES * i), vf16, 32), vf32)
        values.append(value if scales.sign > 0 else e.b.fneg(value))
    return values


def _chunk_scales(e: Emitter, coarse: ir.Value, address: ir.Value, count: int) -> _ChunkScales:
    bytes16 = ir.VectorType(i8, LANES)
    fine = [e.b.sext(e.load(e.at(address, LANES * i), bytes16, LANES), vi32) for i in range(count)]
    if count == 1:
        return _ChunkScales(e.b.fmul(coarse, e.b.sitofp(fine[0], vf32)), [])
    return _ChunkScales(coarse, fine)


def _codes(e: Emitter, layout: BlockLayout, address: ir.Value) -> list[ir.Value]:
    """T[q] of a chunk as 8 vectors [16 rows][4] of unsigned bytes."""
    b = e.b
    quarters: list[ir.Value] = []
    low = 0
    for plane in layout.planes:
        stored = [e.load(e.at(address, 64 * i), vi8x64, 64) for i in range(plane)]
        for k in range(_QUARTERS):
            bits = stored[k % plane]
            right = k // plane * plane - low
            mask = (1 << plane) - 1 << low
            if right > 0:
                bits = b.lshr(bits, e.const(vi8x64, right))
            elif right < 0:
                bits = b.shl(bits, e.const(vi8x64, -right))
            if mask != 0xFF >> max(right, 0) & 0xFF << max(-right, 0) & 0xFF:
                bits = b.and_(bits, e.const(vi8x64, mask))
            if low:
                quarters[k] = b.or_(quarters[k], bits)
            else:
                quarters.append(bits)
        address = e.at(address, 64 * plane)
        low += plane
    return [e.lookup(layout.table, q) for q in quarters] if layout.table else quarters


class _QuantizedX:
    """Chunk ``index`` of a row of activations as quantize_rows.py leaves it."""

    def __init__(self, e: Emitter, row: ir.Value, in_features: ir.Value, chunks: ir.Value, index: ir.Value) -> None:
        self._e = e
        self._high_plane = e.at(row, index, CHUNK)
        self._low_plane = e.b.add(self._high_plane, in_features)
        scales = e.at(row, in_features, 2)
        self._scale = e.at(scales, index, 4)
        self._sum = e.at(self._scale, chunks, 4)
        self._scaled_sum = e.at(self._sum, chunks, 4)
        self._run_sums = e.at(e.at(scales, chunks, 12), index, 8)

    def scale(self) -> ir.Value:
        """d_x"""
        return self._e.load(self._scale, f32, 4)

    def sum(self) -> ir.Value:
        """Σ q_x, int32"""
        return self._e.load(self._sum, i32, 4)

    def scaled_sum(self) -> ir.Value:
        """d_x · Σ q_x"""
        return self._e.load(self._scaled_sum, f32, 4)

    def run_sums(self, run: int) -> tuple[ir.Value, ir.Value]:
        """Σ high and Σ low of 16 values, int32."""
        low, high = (self._e.load(self._e.at(self._run_sums, 4 * run + 2 * i), i16, 2) for i in range(2))
        return self._e.b.sext(high, i32), self._e.b.sext(low, i32)

    def quarter(self, k: int) -> tuple[ir.Value, ir.Value]:
        """high and low of 4 values, in all lanes."""
        high, low = (self._e.load(self._e.at(plane, 4 * k), i32, 4) for plane in (self._high_plane, self._low_plane))
        return self._e.b.bitcast(self._e.splat(high), vi8x64), self._e.b.bitcast(self._e.splat(low), vi8x64)


def _dots(e: Emitter, layout: BlockLayout, chunks: list[_Chunk], x: _QuantizedX) -> list[ir.Value]:
    """Of each group Σ s·(T[q] − zero)·q_x, float32; s, fine scales of runs of 16, is 1 where there are none."""
    b = e.b
    runs = len(chunks[0].scales.fine) or 1
    dots: list[tuple[list[ir.Value], list[ir.Value]]] = []  # of each run, of high and of low of each group
    for run in range(runs):
        high_start, low_start = _minus_zero(e, layout.zero, x, run if runs > 1 else None)
        highs, lows = [high_start] * len(chunks), [low_start] * len(chunks)
        for k in range(run * _QUARTERS // runs, (run + 1) * _QUARTERS // runs):
            high_x, low_x = x.quarter(k)
            highs = [e.dot4(total, chunk.codes[k], high_x) for total, chunk in zip(highs, chunks, strict=True)]
            lows = [e.dot4(total, chunk.codes[k], low_x) for total, chunk in zip(lows, chunks, strict=True)]
        dots.append((highs, lows))
    totals = []
    for g, chunk in enumerate(chunks):
        if runs == 1:
            ((highs, lows),) = dots
            totals.append(b.sitofp(b.add(b.shl(highs[g], e.const(vi32, 8)), lows[g]), vf32))
        else:
            high = _weighted(e, chunk.scales.fine, [highs[g] for highs, _ in dots])
            low = _weighted(e, chunk.scales.fine, [lows[g] for _, lows in dots])
            totals.append(e.fma(b.sitofp(high, vf32), e.const(vf32, 256.0), b.sitofp(low, vf32)))
    return totals


def _minus_zero(e: Emitter, zero: int, x: _QuantizedX, run: int | None) -> tuple[ir.Value, ir.Value]:
    """What dots of high and of low start at: together −zero·Σ q_x; of a run of 16 each for itself."""
    nothing = ir.Constant(vi32, None)
    if not zero:
        return nothing, nothing
    sums = [x.sum()] if run is None else list(x.run_sums(run))
    *high, low = (e.splat(e.b.mul(total, e.integer(-zero, i32))) for total in sums)
    return high[0] if high else nothing, low


def _scaled_sum(e: Emitter, fine_minima: list[ir.Value], x: _QuantizedX) -> ir.Value:
    """d_x · Σ q_x, the sums of runs of 16 times their fine minima where there are any."""
    if not fine_minima:
        return e.splat(x.scaled_sum())
    sums = []
    for run in range(len(fine_minima)):
        high, low = x.run_sums(run)
        sums.append(e.splat(e.b.add(e.b.shl(high, e.integer(8, i32)), low)))
    return e.b.fmul(e.b.sitofp(_weighted(e, fine_minima, sums), vf32), e.splat(x.scale()))


def _weighted(e: Emitter, factors: list[ir.Value], values: list[ir.Value]) -> ir.Value:
    first, *rest = (e.b.mul(factor, value) for factor, value in zip(factors, values, strict=True))
    for product in rest:
        first = e.b.add(first, product)
    return first
