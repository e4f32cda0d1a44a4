"""codes: from a lane's packed words (``packing.py``) to the signed bytes that tensor cores multiply, of any format.

Functions of a format, inlined into kernels. All words of a quad's planes are shifted, cut and put together, then made
int8: codes in two's complement go to the top of their byte, so that they have their sign and are 2^(8 - bits) times too
much (``scale_of_bytes``); codes with a table are looked up, four at once, by ``prmt``; others are what they are.
"""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda.types import float32, int32, uint32

from numba_engine.backends.cuda.kernels.intrinsics import permute
from numba_engine.backends.cuda.kernels.packing import PLACES, is_twos_complement, layout_of
from numba_engine.formats import Codes, Format


def scale_of_bytes(codes: Codes) -> float:
    """What the bytes are to be multiplied with."""
    return 2.0 ** (codes.bits - 8) if is_twos_complement(codes) else 1.0


def word_of(bits: int) -> Any:
    """Which of a lane's words of a plane holds a quad: word(group, i, h)."""
    return _weighted(PLACES[bits][0])


def part_of(bits: int, low: int) -> Any:
    """What a plane holds of a quad's codes, in their bytes: part(word, group, i, h). ``low``: its lowest bit."""
    bit, mask = _weighted(PLACES[bits][1]), ((1 << bits) - 1) * 0x01010101

    @cuda.jit(device=True, forceinline=True)
    def part(word, group, i, h):  # type: ignore[no-untyped-def]
        return uint32(uint32(uint32(word >> bit(group, i, h)) & uint32(mask)) << uint32(low))

    return part


def _weighted(weights: tuple[int, int, int]) -> Any:
    of_group, of_i, of_h = weights

    @cuda.jit(device=True, forceinline=True)
    def weighted(group, i, h):  # type: ignore[no-untyped-def]
        sum_of_two = uint32(uint32(of_group) * uint32(group) + uint32(of_i) * uint32(i))
        return uint32(sum_of_two + uint32(of_h) * uint32(h))

    return weighted


def bytes_of(codes: Codes) -> Any:
    """Signed bytes of a word of four codes."""
    up = 8 - codes.bits if is_twos_complement(codes) else 0
    if codes.table or (codes.zero and not up):
        return _lookup(codes)
    assert codes.bits < 8 or codes.signed, "unsigned bytes are no int8"

    @cuda.jit(device=True, forceinline=True)
    def as_bytes(word):  # type: ignore[no-untyped-def]
        return uint32(word << uint32(up))

    return as_bytes


def _lookup(codes: Codes) -> Any:
    """T[q] - zero of four codes of up to 4 bits, by byte permutes (PTX ISA, "prmt")."""
    assert codes.bits <= 4, "a table of up to 16 numbers"
    numbers = [number - codes.zero for number in codes.table or range(1 << codes.bits)]
    numbers += [0] * (16 - len(numbers))
    t0, t1, t2, t3 = (sum((n & 0xFF) << 8 * i for i, n in enumerate(numbers[at : at + 4])) for at in (0, 4, 8, 12))
    is_short = codes.bits <= 3

    @cuda.jit(device=True, forceinline=True)
    def as_bytes(word):  # type: ignore[no-untyped-def]
        pairs = uint32(word | uint32(word >> uint32(4)))  # two codes each in bytes 0 and 2
        selector = permute(pairs, uint32(0), uint32(0x4420))
        if is_short:
            return permute(uint32(t0), uint32(t1), selector)
        selector = uint32(selector & uint32(0x7777))
        first, second = permute(uint32(t0), uint32(t1), selector), permute(uint32(t2), uint32(t3), selector)
        is_second = permute(uint32(word << uint32(4)), uint32(0), uint32(0xBA98))  # a byte of ones for bit 3
        return uint32(uint32(second & is_second) | uint32(first & uint32(~is_second)))

    return as_bytes


def fine_of(format: Format) -> Any:
    """A fine scale (kind 0) or minimum (kind 1) as a float: fine(words, at, kind, group, i, h)."""
    runs = 64 // layout_of(format).run
    per_group = runs // 2

    @cuda.jit(device=True, forceinline=True)
    def fine(words, at, kind, group, i, h):  # type: ignore[no-untyped-def]
        run = uint32(uint32(per_group) * uint32(group))
        if per_group == 2:
            run = uint32(run + uint32(i))
        place = uint32(uint32(uint32(2 * kind) + uint32(h)) * uint32(runs) + run)
        up = uint32(uint32(24) - uint32(8) * (place & uint32(3)))
        word = words[uint32(uint32(at) + uint32(place >> uint32(2)))]
        return float32(int32(int32(uint32(word << up)) >> int32(24)))

    return fine
