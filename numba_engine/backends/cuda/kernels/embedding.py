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
from numba_engine.backends.cuda.kernels.intrinsics import (
    as_float,
    float_of_bf16,
    float_of_half,
    fma,
    load_quad,
    store_quad,
)
from numba_engine.backends.cuda.kernels.packing import LAYOUTS, num_units
from numba_engine.formats import F16, F32, Q4_1, Q8_0, Format

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
    return Kernel(f"embedding_{format.name.lower()}", embedding, arguments, THREADS)


@cuda.jit(device=True, inline="always")
def _f32(table, row, column, hidden, units):  # type: ignore[no-untyped-def]
    words = load_quad(table, uint32(row * hidden + column))
    return as_float(words[0]), as_float(words[1]), as_float(words[2]), as_float(words[3])


@cuda.jit(device=True, inline="always")
def _share(row, column, units):  # type: ignore[no-untyped-def]
    """Of the row's tile: its unit, and in it group, lane and half of the quad at ``column``."""
    unit = uint32(uint32(row >> uint32(4)) * units + (column >> uint32(6)))
    group = uint32(uint32(column >> uint32(5)) & uint32(1))
    lane = uint32(uint32(row & uint32(7)) * uint32(4) + (uint32(column >> uint32(3)) & uint32(3)))
    return unit, group, lane, uint32(uint32(row >> uint32(3)) & uint32(1))


def _halves(format: Format) -> Any:
    to_float = float_of_half if format is F16 else float_of_bf16
    unit_words = LAYOUTS[format].unit_words

    @cuda.jit(device=True, inline="always")
    def read(table, row, column, hidden, units):  # type: ignore[no-untyped-def]
        unit, group, lane, half = _share(row, column, units)
        load = uint32(group * uint32(2) + (uint32(column >> uint32(2)) & uint32(1)))
        place = uint32(unit * uint32(unit_words) + uint32(load * uint32(32) + lane) * uint32(4) + half)
        first, second = table[place], table[uint32(place + uint32(2))]
        return to_float(first, 0), to_float(first, 1), to_float(second, 0), to_float(second, 1)

    return read


def _quantized(format: Format) -> Any:
    is_q8, has_minima = format is Q8_0, format is Q4_1
    layout = LAYOUTS[format]
    unit_words, weight_words = layout.unit_words, layout.weight_words
    scale_words = layout.scale_words // 16
    # A nibble goes to the top of a signed word (Q4_0) or of an unsigned one, a byte to that of a signed one.
    width = 8 if is_q8 else 4

    @cuda.jit(device=True, inline="always")
    def read(table, row, column, hidden, units):  # type: ignore[no-untyped-def]
        unit, group, lane, half = _share(row, column, units)
        eighth = uint32(uint32(column >> uint32(2)) & uint32(1))
        first = uint32(unit * uint32(unit_words))
        if is_q8:
            word = table[uint32(first + uint32(group * uint32(32) + lane) * uint32(4) + eighth * uint32(2) + half)]
        else:
            word = table[uint32(first + uint32(lane * uint32(2) + group) * uint32(2) + half)]
            word = uint32(word >> (eighth * uint32(4)))
        g = uint32(lane >> uint32(2))
        place = uint32(first + uint32(weight_words) + uint32(g * uint32(2) + group) * uint32(scale_words))
        scale = float_of_half(table[place], half)
        minimum = float32(0)
        if has_minima:
            minimum = float_of_half(table[uint32(place + uint32(1))], half)
        return (
            fma(scale, _integer(word, 0), minimum),
            fma(scale, _integer(word, 1), minimum),
            fma(scale, _integer(word, 2), minimum),
            fma(scale, _integer(word, 3), minimum),
        )

    @cuda.jit(device=True, inline="always")
    def _integer(word, i):  # type: ignore[no-untyped-def]
        top = uint32(word << uint32(32 - width - 8 * i))
        if has_minima:
            return float32(uint32(top >> uint32(32 - width)))
        return float32(int32(int32(top) >> int32(32 - width)))

    return read


def launch(backend: CudaBackend, out: Array, token_ids: Array, table: Weight, scale: float) -> None:
    (segment,) = table.segments  # an embedding table is one tensor
    num_tokens, hidden = out.shape
    grid = num_tokens, -(-hidden // (4 * THREADS))
    arrays = [out, token_ids, segment.data]
    backend.launch(embedding_kernel(segment.format), grid, [*arrays, hidden, num_units(hidden), scale])
