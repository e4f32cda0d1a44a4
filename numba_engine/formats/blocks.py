"""Blocks of bytes to numbers and back, as the descriptor says where they lie."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np

from numba_engine.formats.descriptor import Bits, Field, Format, Parts, Scales


def unpack(format: Format, blocks: np.ndarray) -> Parts:
    """The numbers of uint8 [blocks, block_bytes]."""
    assert format.codes
    return Parts(_read(blocks, format.codes.fields, format.codes.signed), *unpack_scales(format, blocks))


def unpack_scales(format: Format, blocks: np.ndarray) -> tuple[Any, ...]:
    """``Parts`` but the codes: the coarse and fine scales, and minima if the format has them."""
    assert format.scales
    minima = _read_scales(blocks, format.minima) if format.minima else ()
    return *_read_scales(blocks, format.scales), *minima


def pack(format: Format, parts: Parts) -> np.ndarray:
    """uint8 [blocks, block_bytes] of the numbers; coarse ones are rounded to float16."""
    assert format.codes
    assert format.scales
    blocks = np.zeros((len(parts.codes), format.block_bytes), np.uint8)
    _write(blocks, format.codes.fields, parts.codes)
    _write_scales(blocks, format.scales, parts.scale, parts.fine_scales)
    if format.minima:
        _write_scales(blocks, format.minima, parts.minimum, parts.fine_minima)
    return blocks


def values_of(format: Format, parts: Parts) -> np.ndarray:
    """float32 [blocks, block_size]"""
    assert format.codes
    assert format.scales
    codes = np.array(format.codes.table)[parts.codes] if format.codes.table else parts.codes
    scales = _scale_of_values(format, format.scales, parts.scale, parts.fine_scales)
    values = scales * (codes - format.codes.zero).astype(np.float32)
    if not format.minima:
        return values
    return values + _scale_of_values(format, format.minima, parts.minimum, parts.fine_minima)


def _scale_of_values(format: Format, scales: Scales, coarse: np.ndarray | None, fine: np.ndarray | None) -> np.ndarray:
    assert coarse is not None
    coarse = coarse * np.float32(scales.sign)
    if fine is None:
        return coarse
    assert scales.run * fine.shape[1] == format.block_size
    return np.repeat(coarse * (fine - scales.fine_offset).astype(np.float32), scales.run, axis=1)


def _read_scales(blocks: np.ndarray, scales: Scales) -> tuple[np.ndarray, np.ndarray | None]:
    coarse = np.ascontiguousarray(blocks[:, scales.at : scales.at + 2]).view(np.float16).astype(np.float32)
    return coarse, _read(blocks, scales.fine, scales.fine_signed) if scales.fine else None


def _write_scales(blocks: np.ndarray, scales: Scales, coarse: np.ndarray | None, fine: np.ndarray | None) -> None:
    assert coarse is not None
    blocks[:, scales.at : scales.at + 2] = coarse.astype(np.float16).view(np.uint8)
    if fine is not None:
        _write(blocks, scales.fine, fine)


def _read(blocks: np.ndarray, field: Field, signed: bool) -> np.ndarray:
    """int32 [blocks, elements]"""
    total = np.zeros((len(blocks), len(field)), np.int32)
    position = 0
    for runs in zip_longest(*field, fillvalue=Bits(0, 0, 0)):  # all elements' lowest bits, then the next
        byte, shift, width = np.array(runs, np.int32).T
        total |= (blocks[:, byte] >> shift & (1 << width) - 1) << position
        position = position + width
    return total - ((total >> (position - 1)) << position) if signed else total


def _write(blocks: np.ndarray, field: Field, numbers: np.ndarray) -> None:
    for element, runs in enumerate(field):
        position = 0
        for byte, shift, width in runs:
            blocks[:, byte] |= ((numbers[:, element] >> position & (1 << width) - 1) << shift).astype(np.uint8)
            position += width
