"""pack_groups: blocks of a quantised format, as their file has them, into the layout of layout.py.

The descriptor says in which bit of a block each bit of the stream lies. Of every word of the stream those bits that
move alike, from one word of the block and by one shift, are moved together: (load >> shift) & mask, or'ed.
Bytes moved: in and out once each. A strip of blocks of a row is read in one go, so that reads are long; the strip's 16
rows are in L1.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from numba_engine.backends.cpu.compilation import kernel_address, launcher
from numba_engine.backends.cpu.intrinsics import LANES, Emitter, call_kernel, emit, i8, i16, i32, load_i64
from numba_engine.backends.cpu.layout import CHUNK, BlockLayout, block_layout
from numba_engine.formats import Bits, Codes, Format, Scales, label

_STRIP_VALUES = 256
_OUT, _DATA, _ROW_BYTES, _GROUP_BYTES, _SCALE_BYTES, _BLOCKS = range(6)

Move = tuple[int, int]
"""Bit of the block, bit of the number that it becomes."""


@launcher
def pack_groups(kernel: int, out: np.ndarray, data: np.ndarray, scale_bytes: int, blocks: int) -> None:
    """``data`` uint8 [16 groups, row_bytes] to ``out`` uint8 [groups, group_bytes]."""
    args = np.empty(6, dtype=np.int64)
    args[_OUT], args[_DATA] = out.ctypes.data, data.ctypes.data
    args[_ROW_BYTES], args[_GROUP_BYTES] = data.shape[1], out.shape[1]
    args[_SCALE_BYTES], args[_BLOCKS] = scale_bytes, blocks
    call_kernel(kernel, 0, out.shape[0], args.ctypes.data)


@functools.cache
def pack_groups_kernel(format: Format) -> int:
    """Address of the kernel for this format."""
    layout = block_layout(format)
    coarse_bytes, block_bytes, from_bytes = layout.coarse_bytes, layout.block_bytes, format.block_bytes
    strip_blocks = max(1, _STRIP_VALUES // format.block_size)
    pack_block = _block_packer(format, layout)

    def pack_group_items(begin: int, end: int, args: int) -> None:
        blocks, row_bytes = load_i64(args, _BLOCKS), load_i64(args, _ROW_BYTES)
        for group in range(begin, end):
            data = load_i64(args, _DATA) + group * LANES * row_bytes
            coarse = load_i64(args, _OUT) + group * load_i64(args, _GROUP_BYTES)
            stream = coarse + load_i64(args, _SCALE_BYTES)
            for first in range(0, blocks, strip_blocks):
                for lane in range(LANES):
                    for block in range(first, min(first + strip_blocks, blocks)):
                        pack_block(
                            data + lane * row_bytes + block * from_bytes,
                            coarse + block * coarse_bytes + lane * 2,
                            stream + block * block_bytes,
                            lane,
                        )

    return kernel_address(pack_group_items, "void(int64, int64, int64)", label(format))


def _block_packer(format: Format, layout: BlockLayout) -> Any:
    """Intrinsic: the block of one row at ``block``; ``coarse``: of this lane, ``stream``: of all lanes."""
    codes, scales, minima = format.codes, format.scales, format.minima
    assert codes
    assert scales

    def body(b: ir.IRBuilder, block: ir.Value, coarse: ir.Value, stream: ir.Value, lane: ir.Value) -> None:
        e = Emitter(b)
        for i, at in enumerate(which.at for which in (scales, minima) if which):
            e.store(e.load(e.at(block, at), i16, 1), e.at(coarse, 2 * LANES * i), 2)
        of_lane = b.add(stream, lane)
        for chunk in range(layout.chunks):
            fine = e.at(of_lane, chunk * layout.fine_chunk_bytes)
            for which, count in ((scales, layout.fine_scales), (minima, layout.fine_minima)):
                for i in range(count):
                    assert which
                    value = _fine(e, block, which, chunk * count + i, format.block_bytes)
                    e.store(value, fine, 1)
                    fine = e.at(fine, LANES)
        of_lane = e.at(e.at(stream, layout.fine_bytes), lane, 4)
        for vector, word in enumerate(_code_words(codes, layout)):
            flip = 0
            if codes.signed and vector % sum(layout.planes) >= sum(layout.planes[:-1]):
                plane = layout.planes[-1]
                flip = sum(1 << field + plane - 1 for field in range(0, 32, plane))
            value = _gather(e, block, word, format.block_bytes, i32)
            e.store(b.xor(value, e.integer(flip, i32)) if flip else value, e.at(of_lane, 64 * vector), 4)

    return emit(f"pack_block_{label(format)}", types.void, 4, body)


def _fine(e: Emitter, block: ir.Value, scales: Scales, j: int, block_bytes: int) -> ir.Value:
    """Fine scale j as int8, its offset subtracted."""
    moves = _moves(scales.fine[j])
    sign = 1 << len(moves) - 1 if scales.fine_signed else 0
    assert len(moves) < 8 or sign
    value = _gather(e, block, moves, block_bytes, i8)
    if sign:
        value = e.b.xor(value, e.integer(sign, i8))
    return e.b.sub(value, e.integer(sign + scales.fine_offset, i8))


def _code_words(codes: Codes, layout: BlockLayout) -> list[list[Move]]:
    """The words that one row has in the planes of a block, one in each vector."""
    words = []
    for first in range(0, layout.chunks * CHUNK, CHUNK):
        low = 0
        for plane in layout.planes:
            for vector in range(plane):
                word = []
                for field in range(8 // plane):
                    for i in range(4):
                        code = _moves(codes.fields[first + 4 * (field * plane + vector) + i])
                        place = 8 * i + field * plane - low
                        word += [(source, place + bit) for source, bit in code if low <= bit < low + plane]
                words.append(word)
            low += plane
    return words


def _moves(runs: Sequence[Bits]) -> list[Move]:
    """The bits of one number."""
    sources = [8 * byte + shift + bit for byte, shift, width in runs for bit in range(width)]
    return [(source, bit) for bit, source in enumerate(sources)]


def _gather(e: Emitter, block: ir.Value, moves: list[Move], block_bytes: int, word: ir.IntType) -> ir.Value:
    """The number of type ``word`` that has these bits of the block."""
    size = word.width // 8
    masks: dict[tuple[int, int], int] = {}
    for source, bit in moves:
        # From the word that holds the byte where the number has it, as far as the block reaches.
        load = min(max(source // 8 - bit // 8, 0), block_bytes - size)
        key = load, source - 8 * load - bit
        masks[key] = masks.get(key, 0) | 1 << bit
    total = None
    for (load, right), mask in masks.items():
        value = e.load(e.at(block, load), word, 1)
        if right > 0:
            value = e.b.lshr(value, e.integer(right, word))
        elif right < 0:
            value = e.b.shl(value, e.integer(-right, word))
        if mask != (1 << word.width) - 1:
            value = e.b.and_(value, e.integer(mask, word))
        total = value if total is None else e.b.or_(total, value)
    assert total is not None
    return total
