"""Rounding by the book: exact rationals to a binary floating format. Slow, and independent of what it checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Format:
    precision: int
    """Significant bits, the leading one included."""
    emin: int
    """Exponent of the smallest normal number."""
    largest: Fraction
    bias: int
    bits: int


F32 = Format(24, -126, (2 - Fraction(1, 2**23)) * 2**127, 127, 32)
F64 = Format(53, -1022, (2 - Fraction(1, 2**52)) * 2**1023, 1023, 64)
F16 = Format(11, -14, Fraction(65504), 15, 16)
BF16 = Format(8, -126, (2 - Fraction(1, 2**7)) * 2**127, 127, 16)
E4M3 = Format(4, -6, Fraction(448), 7, 8)
E5M2 = Format(3, -14, Fraction(57344), 15, 8)


def quantum(value: Fraction, format: Format) -> Fraction:
    """Distance between representable numbers around the value."""
    magnitude = abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < Fraction(2) ** exponent:
        exponent -= 1
    return Fraction(2) ** (max(exponent, format.emin) - format.precision + 1)


def round_exact(value: Fraction, format: Format, mode: str = "rn") -> Fraction | float:
    """The representable number, or an infinity."""
    if value == 0:
        return Fraction(0)
    unit = quantum(value, format)
    steps = value / unit
    down = math.floor(steps)
    match mode:
        case "rz":
            whole = down if value > 0 else math.ceil(steps)
        case "rm":
            whole = down
        case "rp":
            whole = math.ceil(steps)
        case _:
            rest = steps - down
            whole = down + (1 if rest > Fraction(1, 2) or (rest == Fraction(1, 2) and down % 2) else 0)
    result = whole * unit
    if abs(result) <= format.largest:
        return result
    toward_zero = mode == "rz" or (mode == "rm" and value > 0) or (mode == "rp" and value < 0)
    if toward_zero:
        return format.largest if value > 0 else -format.largest
    return math.inf if value > 0 else -math.inf


def encode(value: Fraction | float, format: Format, negative_zero: bool = False) -> int:
    """Bits of a representable number (infinities as IEEE has them)."""
    top = format.bits - 1
    fraction_bits = format.precision - 1
    if isinstance(value, float):
        assert math.isinf(value)
        exponent = (1 << (top - fraction_bits)) - 1
        return (int(value < 0) << top) | (exponent << fraction_bits)
    if value == 0:
        return int(negative_zero) << top
    unit = quantum(value, format)
    steps = abs(value) / unit
    assert steps.denominator == 1
    mantissa = steps.numerator
    if mantissa < 1 << fraction_bits:
        exponent = 0
    else:
        exponent = (unit.numerator.bit_length() - unit.denominator.bit_length()) + fraction_bits + format.bias
        mantissa -= 1 << fraction_bits
    return (int(value < 0) << top) | (exponent << fraction_bits) | mantissa


def by_rule(
    exact: Callable[..., Fraction | None],
    otherwise: Callable[..., float],
    format: Format,
    mode: str,
    *operands: np.ndarray,
) -> np.ndarray:
    """Elementwise ``exact`` rounded once, as bits; ``otherwise`` (float64) decides infinities, NaN and signs of zero.

    NaN is returned as all ones.
    """
    out = []
    for values in zip(*(operand.tolist() for operand in operands), strict=True):
        with np.errstate(all="ignore"):
            plain = float(otherwise(*(np.float64(v) for v in values)))
        result = exact(*map(Fraction, values)) if all(map(math.isfinite, values)) else None
        if result is None:
            out.append(
                (1 << format.bits) - 1
                if math.isnan(plain)
                else encode(_special(plain, format), format, _is_negative(plain))
            )
            continue
        rounded = round_exact(result, format, mode)
        negative_zero = result < 0 or (result == 0 and _is_negative(plain))
        out.append(encode(rounded, format, negative_zero))
    return np.array(out, f"u{format.bits // 8}")


def _special(plain: float, format: Format) -> Fraction | float:
    if math.isinf(plain):
        return plain
    rounded = round_exact(Fraction(plain), format)
    assert rounded == Fraction(plain), "an infinite operand gives an exact result"
    return rounded


def _is_negative(value: float) -> bool:
    return math.copysign(1.0, value) < 0


def canonical(bits: np.ndarray, format: Format) -> np.ndarray:
    """All NaN as all ones."""
    unsigned = bits.view(f"u{format.bits // 8}")
    top = format.bits - 1
    fraction_bits = format.precision - 1
    exponent = ((1 << (top - fraction_bits)) - 1) << fraction_bits
    magnitude = unsigned & unsigned.dtype.type((1 << top) - 1)
    return np.where(magnitude > exponent, unsigned.dtype.type((1 << format.bits) - 1), unsigned)
