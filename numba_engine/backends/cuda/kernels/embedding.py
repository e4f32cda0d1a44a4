"""embedding: out = table[token_ids] * scale, from the table as ``linear`` streams it (tied models have only that).

Arrays (flat): out float32 [num_tokens, hidden]; token_ids int32 [num_tokens]; table uint32, packed (``packing.py``);
hidden a multiple of 4.

A thread a quad of the output finds its words (two of halves, one of bytes or nibbles), widens them and writes 16 bytes.
No shared memory. Bytes moved: a row of the table and one of out a token; the row's words lie 8 apart in threes and
fours, among those of the tile's other rows, so the sectors that hold them are read, up to 8 times as many bytes: a few
KB a token.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from numba_engine.backends.arrays import Array, Weight
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels.codes import bytes_of, fine_of, part_of, scale_of_bytes, word_of
from numba_engine.backends.cuda.kernels.intrinsics import (
    as_float,
    float_of_bf16,
    float_of_half,
    fma,
    load_quad,
    multiply,
    store_quad,
)
from numba_engine.backends.cuda.kernels.packing import layout_of, num_units
from numba_engine.formats import F16, F32, Format, label

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend

THREADS = 256


@cache
def embedding_kernel(format: Format) -> Kernel:
    read = _f32 if format is F32 else (_quantized if format.is_quantized else _halves)(format)

    def embedding(out, token_ids, table, hidden, units, scale):  # type: ignore[no-untyped-def]
        column = uint32(uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x)) * uint32(4))
        if column >= hidden:
            return
        token = uint32(cuda.blockIdx.x)
        a, b, c, d = read(table, uint32(token_ids[token]), column, hidden, units)
        scaled = (float32(a * scale), float32(b * scale), float32(c * scale), float32(d * scale))
        store_quad(out, uint32(token * hidden + column), scaled)

    arguments = (float32[::1], int32[::1], uint32[::1], uint32, uint32, float32)
    return Kernel(f"embedding_{label(format)}", embedding, arguments, THREADS)


@cuda.jit(device=True, inline="always")
def _f32(table, row, column, hidden, units):  # type: ignore[no-untyped-def]
    words = load_quad(table, uint32(row * hidden + column))
    return as_float(words[0]), as_float(words[1]), as_float(words[2]), as_float(words[3])


def _halves(format: Format) -> Any:
    to_float = float_of_half if format is F16 else float_of_bf16
    unit_words = layout_of(format).unit_words

    @cuda.jit(device=True, inline="always")
    def read(table, row, column, hidden, units):  # type: ignore[no-untyped-def]
        unit, group, h = _unit_of(row, column, units)
        t, i = uint32(uint32(column >> uint32(3)) & uint32(3)), uint32(uint32(column >> uint32(2)) & uint32(1))
        lane, load = uint32(uint32(row & uint32(7)) * uint32(4) + t), uint32(group * uint32(2) + i)
        place = uint32(unit * uint32(unit_words) + uint32(load * uint32(32) + lane) * uint32(4) + h)
        first, second = table[place], table[uint32(place + uint32(2))]
        return to_float(first, 0), to_float(first, 1), to_float(second, 0), to_float(second, 1)

    return read


def _quantized(format: Format) -> Any:
    assert format.codes
    codes, layout = format.codes, layout_of(format)
    is_split, has_fine, has_minima = layout.run == 16, layout.fine_words > 0, format.minima is not None
    has_fine_minima = bool(format.minima and format.minima.fine)
    unit_words, coarse_words, fine_words = layout.unit_words, layout.coarse_words, layout.fine_words
    coarse_at, coarse_stride = layout.weight_words, coarse_words // 2 if format.block_size == 32 else 0
    fine_at = coarse_at + 8 * coarse_words
    code_scale = scale_of_bytes(codes)
    as_bytes, fine = bytes_of(codes), fine_of(format)
    first, *others = layout.planes
    second = others[0] if others else 0
    read_first, read_second = _plane(first, 0, 0), _plane(second or first, first, 32 * first)

    @cuda.jit(device=True, inline="always")
    def read(table, row, column, hidden, units):  # type: ignore[no-untyped-def]
        unit, group, h = _unit_of(row, column, units)
        t, i = uint32(uint32(column >> uint32(3)) & uint32(3)), uint32(uint32(column >> uint32(2)) & uint32(1))
        if is_split:
            t, i = uint32(uint32(column >> uint32(2)) & uint32(3)), uint32(uint32(column >> uint32(4)) & uint32(1))
        g, start = uint32(row & uint32(7)), uint32(unit * uint32(unit_words))
        lane = uint32(g * uint32(4) + t)
        code = read_first(table, start, lane, group, i, h)
        if second:
            code = uint32(code | read_second(table, start, lane, group, i, h))
        word = as_bytes(code)
        coarse = uint32(start + uint32(coarse_at) + g * uint32(coarse_words) + group * uint32(coarse_stride))
        to_fine = uint32(start + uint32(fine_at) + g * uint32(fine_words))
        scale, minimum = float_of_half(table[coarse], h), float32(0)
        if has_fine:
            scale = multiply(scale, fine(table, to_fine, 0, group, i, h))
        scale = multiply(scale, float32(code_scale))
        if has_minima:
            minimum = float_of_half(table[uint32(coarse + uint32(1))], h)
            if has_fine_minima:
                minimum = multiply(minimum, fine(table, to_fine, 1, group, i, h))
        return (
            fma(scale, _signed_byte(word, 0), minimum),
            fma(scale, _signed_byte(word, 1), minimum),
            fma(scale, _signed_byte(word, 2), minimum),
            fma(scale, _signed_byte(word, 3), minimum),
        )

    return read


def _plane(bits: int, low: int, at: int) -> Any:
    """Of a quad's codes, the part in the plane that begins ``at`` words into the unit."""
    per_lane, of_load = min(bits, 4), 128 if bits == 8 else 0
    word_of_quad, part = word_of(bits), part_of(bits, low)

    @cuda.jit(device=True, inline="always")
    def read(table, start, lane, group, i, h):  # type: ignore[no-untyped-def]
        place = uint32(start + uint32(at) + lane * uint32(per_lane))
        if of_load:  # each group is a load
            place = uint32(place + group * uint32(of_load) + word_of_quad(0, i, h))
        else:
            place = uint32(place + word_of_quad(group, i, h))
        return part(table[place], group, i, h)

    return read


@cuda.jit(device=True, inline="always")
def _unit_of(row, column, units):  # type: ignore[no-untyped-def]
    """Of the row's tile: its unit, and in it the group of the column and the half of the row."""
    unit = uint32(uint32(row >> uint32(4)) * units + (column >> uint32(6)))
    return unit, uint32(uint32(column >> uint32(5)) & uint32(1)), uint32(uint32(row >> uint32(3)) & uint32(1))


@cuda.jit(device=True, inline="always")
def _signed_byte(word, i):  # type: ignore[no-untyped-def]
    return float32(int32(int32(uint32(word << uint32(24 - 8 * i))) >> int32(24)))


def launch(backend: CudaBackend, out: Array, token_ids: Array, table: Weight, scale: float) -> None:
    (segment,) = table.segments  # an embedding table is one tensor
    num_tokens, hidden = out.shape
    grid = num_tokens, -(-hidden // (4 * THREADS))
    arrays = [out, token_ids, segment.data]
    backend.launch(embedding_kernel(segment.format), grid, [*arrays, hidden, num_units(hidden), scale])
