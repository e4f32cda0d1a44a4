"""embedding: out = table[token_ids], straight from the table as ``linear`` streams it (tied models have only that).

Arrays (flat): out float32 [num_tokens, hidden]; token_ids int32 [num_tokens]; table uint32, packed (``packing.py``);
hidden a multiple of 4.

A thread a 16-byte load of the table (quantised: a quad of the output) finds its words, widens them and writes quads.
Neighbours read neighbouring words. No shared memory. Bytes moved: one row of the table and one of out a token.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import cuda
from numba.cuda.types import float32, int32, uint32

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
    store_quad,
)
from numba_engine.backends.cuda.kernels.packing import LAYOUTS, lanes_for, num_units
from numba_engine.storage import StorageFormat

THREADS = 256


@cache
def embedding_kernel(format: StorageFormat) -> Kernel:
    function = _quantized(format) if format.is_quantized else _float(format)
    arguments = (float32[::1], int32[::1], uint32[::1], uint32, uint32, uint32)
    return Kernel(f"embedding_{format.label.lower()}", function, arguments, THREADS)


def _float(format: StorageFormat) -> Any:
    values_per_word = 4 // format.block_bytes
    quads_per_load = values_per_word
    quads_per_unit = LAYOUTS[format].unit // 4
    to_float = {StorageFormat.F32: float_of, StorageFormat.F16: float_of_half, StorageFormat.BF16: float_of_bf16}[
        format
    ]

    def embedding(out, token_ids, table, hidden, units, lanes):  # type: ignore[no-untyped-def]
        load = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))  # of the row's 2 units
        if load >= uint32(units * uint32(2)):
            return
        token = uint32(cuda.blockIdx.x)
        row = uint32(token_ids[token])
        base = uint32(uint32(load // uint32(lanes * uint32(2))) * lanes)
        width = min(lanes, uint32(units - base))
        inside = uint32(load - base * uint32(2))
        j = uint32(inside // width)
        lane = uint32(inside - j * width)
        first = uint32(uint32((row >> uint32(2)) * units + base) * uint32(8))
        place = uint32(first + uint32(j * uint32(4) + (row & uint32(3))) * width + lane)
        words = load_quad(table, uint32(place * uint32(4)))
        for i in range(quads_per_load):
            quad = uint32(base * uint32(quads_per_unit) + (j * uint32(quads_per_load) + uint32(i)) * width + lane)
            at = 4 * i // values_per_word
            values = (
                to_float(words[at], 0),
                to_float(words[at + 1 // values_per_word], 1 % values_per_word),
                to_float(words[at + 2 // values_per_word], 2 % values_per_word),
                to_float(words[at + 3 // values_per_word], 3 % values_per_word),
            )
            if uint32(quad * uint32(4)) < hidden:
                store_quad(out, uint32(token * hidden + quad * uint32(4)), values)

    return embedding


def _quantized(format: StorageFormat) -> Any:
    layout = LAYOUTS[format]
    loads, weight_loads, words_per_block = layout.loads, layout.weight_loads, layout.weight_loads // 2
    loads_per_block = words_per_block // 4
    values_per_word = 32 // words_per_block
    quads_per_word = values_per_word // 4
    has_minima = format is StorageFormat.Q4_1
    offset = {StorageFormat.Q8_0: 0.0, StorageFormat.Q4_0: -24.0, StorageFormat.Q4_1: -16.0}[format]
    to_float = float_of_byte if format is StorageFormat.Q8_0 else float_of_nibble

    def embedding(out, token_ids, table, hidden, units, lanes):  # type: ignore[no-untyped-def]
        quad = uint32(uint32(cuda.blockIdx.y) * uint32(THREADS) + uint32(cuda.threadIdx.x))
        if uint32(quad * uint32(4)) >= hidden:
            return
        token = uint32(cuda.blockIdx.x)
        row = uint32(token_ids[token])
        block = uint32(quad >> uint32(3))
        base = uint32(uint32(block // uint32(lanes * uint32(2))) * lanes)
        width = min(lanes, uint32(units - base))
        inside = uint32(block - base * uint32(2))
        half = uint32(inside // width)
        lane = uint32(inside - half * width)
        r = uint32(row & uint32(3))
        first = uint32(uint32((row >> uint32(2)) * units + base) * uint32(loads))
        j = uint32(uint32(quad & uint32(7)) // uint32(quads_per_word))  # word of the block
        load = uint32(uint32(half * uint32(4) + r) * uint32(loads_per_block) + (j >> uint32(2)))
        word = table[uint32(uint32(first + load * width + lane) * uint32(4) + (j & uint32(3)))]
        word = uint32(word >> uint32(uint32(quad % uint32(quads_per_word)) * uint32(16)))
        place = uint32(uint32(first + uint32(weight_loads) * width + lane) * uint32(4))
        scale = float_of_half(_word_at(load_quad(table, place), half, r), r & uint32(1))
        minimum = float32(0)
        if has_minima:
            minima = load_quad(table, uint32(place + width * uint32(4)))
            minimum = float_of_half(_word_at(minima, half, r), r & uint32(1))
        store_quad(
            out,
            uint32(token * hidden + quad * uint32(4)),
            (
                fma(scale, float32(to_float(word, 0) + float32(offset)), minimum),
                fma(scale, float32(to_float(word, 1) + float32(offset)), minimum),
                fma(scale, float32(to_float(word, 2) + float32(offset)), minimum),
                fma(scale, float32(to_float(word, 3) + float32(offset)), minimum),
            ),
        )

    return embedding


@cuda.jit(device=True, inline="always")
def _word_at(words, half, r):  # type: ignore[no-untyped-def]
    """The word of 8 scales that holds row r of block ``half``."""
    low = words[1] if r > uint32(1) else words[0]
    high = words[3] if r > uint32(1) else words[2]
    return high if half > uint32(0) else low


def embedding(
    device: Device,
    out: DeviceArray,
    token_ids: DeviceArray,
    table: DeviceArray,
    format: StorageFormat,
) -> None:
    """``table`` holds one segment: all rows of one format."""
    num_tokens, hidden = out.shape
    units = num_units(format, hidden)
    num_threads = hidden // 4 if format.is_quantized else 2 * units
    grid = num_tokens, -(-num_threads // THREADS)
    arguments = [flat(out), token_ids, table, hidden, units, lanes_for(format, hidden)]
    device.launch(embedding_kernel(format), grid, arguments)
