"""Floating-point instructions and conversions against exact rational arithmetic rounded once."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from numba_engine.backends.ptx import PtxDevice, PtxError
from tests.ptx.rounding import BF16, E4M3, E5M2, F16, F32, F64, Format, by_rule, canonical, encode, round_exact
from tests.ptx.snippets import run

COUNT = 320
_SPECIAL_F32 = [0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38, 1 / 3]


def f32(place: int, *, spread: int = 40) -> np.ndarray:
    """Specials against each other, then numbers close enough in size for rounding to matter, subnormals included."""
    rng = np.random.default_rng(place)
    n = len(_SPECIAL_F32)
    specials = [_SPECIAL_F32[(i // n**place) % n] for i in range(n * n)]
    rest = COUNT - n * n
    values = rng.standard_normal(rest) * 2.0 ** rng.integers(-spread, spread, rest)
    values[:20] = rng.standard_normal(20) * 2.0**-135
    return np.concatenate([np.array(specials), values]).astype(np.float32)


def f16_bits(place: int) -> np.ndarray:
    rng = np.random.default_rng(100 + place)
    edges = np.array([0, 0x8000, 0x3C00, 0xBC00, 0x7C00, 0xFC00, 0x7E00, 1, 0x8001, 0x0400, 0x7BFF, 0x3555], np.uint16)
    crossed = np.array([edges[(i // 12**place) % 12] for i in range(144)], np.uint16)
    near_one = rng.integers(0x3000, 0x4800, 88).astype(np.uint16) | (rng.integers(0, 2, 88) << 15).astype(np.uint16)
    anything = rng.integers(0, 1 << 16, COUNT - 232).astype(np.uint16)
    return np.concatenate([crossed, near_one, anything])


def bf16_bits(place: int) -> np.ndarray:
    return (f32(place, spread=8).view(np.uint32) >> 16).astype(np.uint16)


def as_float(bits: np.ndarray, format: Format) -> np.ndarray:
    """Bits of a 16-bit format as float64, by NumPy."""
    if format is F16:
        return bits.view(np.float16).astype(np.float64)
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def assert_same(code: str, got: np.ndarray, want: np.ndarray, format: Format, *operands: np.ndarray) -> None:
    got, want = canonical(got, format), canonical(want, format)
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        at = int(wrong[0])
        given = [operand[at] for operand in operands]
        pytest.fail(f"{code}: {wrong.size} wrong; {given} gives {got[at]:#x}, expected {want[at]:#x}")


def divide(a: Fraction, b: Fraction) -> Fraction | None:
    return a / b if b else None


def root(a: Fraction) -> Fraction | None:
    """So many bits of the square root that rounding it is rounding the exact one; half a unit stands for the rest."""
    if a < 0 or a == 0:
        return None
    scale = 4**200
    scaled = a * scale
    whole = math.isqrt(math.floor(scaled))
    exact = Fraction(whole) ** 2 == scaled
    return Fraction(whole if exact else Fraction(2 * whole + 1, 2)) / 2**200


EXACT: dict[str, tuple[int, Callable[..., Fraction | None], Callable[..., float]]] = {
    "add": (2, lambda a, b: a + b, lambda a, b: a + b),
    "sub": (2, lambda a, b: a - b, lambda a, b: a - b),
    "mul": (2, lambda a, b: a * b, lambda a, b: a * b),
    "fma": (3, lambda a, b, c: a * b + c, lambda a, b, c: a * b + c),
    "div": (2, divide, lambda a, b: a / b),
    "sqrt": (1, root, np.sqrt),
    "rcp": (1, lambda a: divide(Fraction(1), a), lambda a: np.float64(1) / a),
}


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
@pytest.mark.parametrize("name", EXACT)
def test_f32_arithmetic(device: PtxDevice, name: str, mode: str) -> None:
    count, exact, plain = EXACT[name]
    operands = [f32(place) for place in range(count)]
    code = f"{name}.{mode}.f32 {{d}}, {', '.join('{' + letter + '}' for letter in 'abc'[:count])};"
    got = run(device, code, operands, np.float32)
    want = by_rule(exact, plain, F32, mode, *operands)
    if mode == "rm" and name in ("add", "sub", "fma"):
        # An exact zero is -0 when rounding down, unless both terms are +0; the float64 rule gives +0.
        wide = [operand.astype(np.float64) for operand in operands]
        with np.errstate(all="ignore"):
            first = wide[0] * wide[1] if name == "fma" else wide[0]
        second = -wide[-1] if name == "sub" else wide[-1]
        is_zero = (want & 0x7FFFFFFF) == 0
        want = np.where(is_zero & (np.signbit(first) | np.signbit(second)), np.uint32(0x80000000), want)
    assert_same(code, got, want, F32, *operands)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma", "div", "sqrt"])
def test_f64_arithmetic(device: PtxDevice, name: str) -> None:
    count, exact, plain = EXACT[name]
    rng = np.random.default_rng(7)
    operands = [f32(place).astype(np.float64) * (1 + rng.random(COUNT) * 2.0**-30) for place in range(count)]
    code = f"{name}.rn.f64 {{d}}, {', '.join('{' + letter + '}' for letter in 'abc'[:count])};"
    got = run(device, code, operands, np.float64)
    if name == "fma":
        finite = np.isfinite(operands[0]) & np.isfinite(operands[1]) & np.isfinite(operands[2])
        operands = [operand[finite] for operand in operands]
        got = got[finite]
    assert_same(code, got, by_rule(exact, plain, F64, "rn", *operands), F64, *operands)


def flushed(values: np.ndarray) -> np.ndarray:
    tiny = np.abs(values) < np.float32(2.0**-126)
    return np.where(tiny, np.copysign(np.float32(0), values), values)


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_flush_and_saturation(device: PtxDevice, name: str) -> None:
    count, exact, plain = EXACT[name]
    operands = [f32(place) for place in range(count)]
    letters = ", ".join("{" + letter + "}" for letter in "abc"[:count])
    small = [flushed(operand) for operand in operands]
    rounded = by_rule(exact, plain, F32, "rn", *small).view(np.float32)
    got = run(device, f"{name}.rn.ftz.f32 {{d}}, {letters};", operands, np.float32)
    assert_same("ftz", got, flushed(rounded), F32, *operands)
    clipped = np.where(rounded > 0, np.minimum(rounded, np.float32(1)), np.float32(0))
    got = run(device, f"{name}.rn.ftz.sat.f32 {{d}}, {letters};", operands, np.float32)
    assert_same("ftz.sat", got, flushed(clipped), F32, *operands)


@pytest.mark.parametrize("kind", ["f16", "bf16", "f16x2", "bf16x2"])
@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_half_arithmetic(device: PtxDevice, kind: str, name: str) -> None:
    count, exact, plain = EXACT[name]
    format, bits = (F16, f16_bits) if kind.startswith("f16") else (BF16, bf16_bits)
    low = [bits(place) for place in range(count)]
    letters = ", ".join("{" + letter + "}" for letter in "abc"[:count])
    code = f"{name}.rn.{kind} {{d}}, {letters};"
    want = by_rule(exact, plain, format, "rn", *(as_float(operand, format) for operand in low))
    if not kind.endswith("x2"):
        assert_same(code, run(device, code, low, np.uint16), want, format, *low)
        return
    high = [np.roll(operand, 17) for operand in low]
    packed = [
        operand.astype(np.uint32) | upper.astype(np.uint32) << 16 for operand, upper in zip(low, high, strict=True)
    ]
    got = run(device, code, packed, np.uint32)
    assert_same(code, got.astype(np.uint16), want, format, *low)
    assert_same(code, (got >> 16).astype(np.uint16), np.roll(want, 17), format, *high)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_half_relu_sat_minmax_sign(device: PtxDevice, kind: str) -> None:
    format, bits = (F16, f16_bits) if kind == "f16" else (BF16, bf16_bits)
    a, b = bits(0), bits(1)
    x, y = as_float(a, format), as_float(b, format)
    product = by_rule(*EXACT["fma"][1:], format, "rn", x, y, x)
    value = as_float(product, format)
    got = run(device, f"fma.rn.relu.{kind} {{d}}, {{a}}, {{b}}, {{a}};", [a, b], np.uint16)
    assert_same("relu", got, np.where((value > 0) | np.isnan(value), product, 0).astype(np.uint16), format, a, b)
    got = run(device, f"max.{kind} {{d}}, {{a}}, {{b}};", [a, b], np.uint16)
    assert_same("max", got, _extreme(a, b, x, y, True), format, a, b)
    got = run(device, f"min.NaN.{kind} {{d}}, {{a}}, {{b}};", [a, b], np.uint16)
    want = np.where(np.isnan(x) | np.isnan(y), np.uint16(0x7FFF), _extreme(a, b, x, y, False))
    assert_same("min.NaN", got, want, format, a, b)
    assert (run(device, f"neg.{kind} {{d}}, {{a}};", [a], np.uint16) == a ^ 0x8000).all()
    assert (run(device, f"abs.{kind} {{d}}, {{a}};", [a], np.uint16) == a & 0x7FFF).all()


def _extreme(a: np.ndarray, b: np.ndarray, x: np.ndarray, y: np.ndarray, largest: bool) -> np.ndarray:
    """The number where one is NaN; -0 below +0."""
    first_below = (x < y) | ((x == y) & np.signbit(x))
    chosen = np.where(first_below == largest, b, a)
    return np.where(np.isnan(x), b, np.where(np.isnan(y), a, chosen))


def test_f32_minmax_sign_and_tests(device: PtxDevice) -> None:
    a, b = f32(0), f32(1)
    bits_a, bits_b = a.view(np.uint32), b.view(np.uint32)
    for name in ("min", "max"):
        want = _extreme(bits_a, bits_b, a, b, name == "max")
        assert_same(name, run(device, f"{name}.f32 {{d}}, {{a}}, {{b}};", [a, b], np.float32), want, F32, a, b)
        want = np.where(np.isnan(a) | np.isnan(b), np.uint32(0x7FFFFFFF), want)
        assert_same(name, run(device, f"{name}.NaN.f32 {{d}}, {{a}}, {{b}};", [a, b], np.float32), want, F32, a, b)
    assert_same("neg", run(device, "neg.f32 {d}, {a};", [a], np.float32), bits_a ^ 0x80000000, F32, a)
    assert_same("abs", run(device, "abs.f32 {d}, {a};", [a], np.float32), bits_a & 0x7FFFFFFF, F32, a)
    copied = run(device, "copysign.f32 {d}, {a}, {b};", [a, b], np.uint32)
    assert (copied == (bits_a & 0x80000000 | bits_b & 0x7FFFFFFF)).all()
    magnitude = np.abs(a)
    tests = {
        "finite": np.isfinite(a),
        "infinite": np.isinf(a),
        "number": ~np.isnan(a),
        "notanumber": np.isnan(a),
        "normal": (magnitude >= 2.0**-126) & np.isfinite(a),
        "subnormal": (magnitude < 2.0**-126) & (a != 0),
    }
    for name, want in tests.items():
        got = run(device, f"testp.{name}.f32 %p0, {{a}}; selp.u32 {{d}}, 1, 0, %p0;", [a], np.uint32)
        assert (got == want).all(), name


APPROXIMATE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rsqrt.approx.f32": lambda x: 1 / np.sqrt(x),
    "rcp.approx.f32": lambda x: 1 / x,
    "sqrt.approx.f32": np.sqrt,
    "ex2.approx.f32": np.exp2,
    "lg2.approx.f32": np.log2,
    "sin.approx.f32": np.sin,
    "cos.approx.f32": np.cos,
    "tanh.approx.f32": np.tanh,
    "ex2.approx.ftz.f32": np.exp2,
    "sqrt.approx.ftz.f32": np.sqrt,
}


@pytest.mark.parametrize("name", APPROXIMATE)
def test_approximate_functions(device: PtxDevice, name: str) -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.uniform(-8, 8, 150), rng.uniform(0, 1e6, 150), [0.0, np.inf, 1.0]]).astype(np.float32)
    if name.startswith(("sin", "cos")):
        x = x[:150]
    with np.errstate(all="ignore"):
        want = APPROXIMATE[name](x.astype(np.float64)).astype(np.float32)
    got = run(device, f"{name} {{d}}, {{a}};", [x], np.float32)
    np.testing.assert_allclose(got, want, rtol=2e-7, atol=0)


@pytest.mark.parametrize("name", ["ex2.approx", "tanh.approx"])
@pytest.mark.parametrize("kind", ["f16", "f16x2", "bf16", "bf16x2"])
def test_approximate_functions_of_halves(device: PtxDevice, name: str, kind: str) -> None:
    format, bits = (F16, f16_bits(0)) if kind.startswith("f16") else (BF16, bf16_bits(0))
    form = f"{name}.ftz.{kind}" if name.startswith("ex2") and kind.startswith("bf16") else f"{name}.{kind}"
    x = as_float(bits, format)
    with np.errstate(all="ignore"):
        want = (np.exp2(x) if name.startswith("ex2") else np.tanh(x)).astype(np.float32)
    rounded = by_rule(lambda a: a, lambda a: a, format, "rn", want)
    if kind.startswith("bf16"):
        rounded = np.where((rounded & 0x7F80) == 0, rounded & 0x8000, rounded).astype(np.uint16)
    if not kind.endswith("x2"):
        got = run(device, f"{form} {{d}}, {{a}};", [bits], np.uint16)
    else:
        got = (run(device, f"{form} {{d}}, {{a}};", [bits.astype(np.uint32) << 16], np.uint32) >> 16).astype(np.uint16)
    exact = np.abs(as_float(bits, format)) >= 2.0**-126
    assert_same(form, got[exact], rounded[exact], format, bits[exact])


def test_f64_functions(device: PtxDevice) -> None:
    x = np.concatenate([np.abs(f32(0)[144:].astype(np.float64)), [0.0, -0.0, np.inf, 4.0]])
    with np.errstate(all="ignore"):
        want = {"rcp.rn.f64": 1 / x, "rsqrt.approx.f64": 1 / np.sqrt(x)}
    want["rsqrt.approx.f64"][-3] = -np.inf
    for name, exact in want.items():
        np.testing.assert_allclose(run(device, f"{name} {{d}}, {{a}};", [x], np.float64), exact, rtol=1e-15)
    bits = x.view(np.uint64)
    copied = run(device, "copysign.f64 {d}, {a}, {b};", [-x, x], np.uint64)
    assert (copied == (-x).view(np.uint64) & (1 << 63) | bits & ~np.uint64(1 << 63)).all()


def test_division_forms(device: PtxDevice) -> None:
    a, b = f32(0), f32(1)
    want = by_rule(*EXACT["div"][1:], F32, "rn", a, b)
    for form in ("div.full.f32", "div.approx.f32"):
        assert_same(form, run(device, f"{form} {{d}}, {{a}}, {{b}};", [a, b], np.float32), want, F32, a, b)


FLOAT_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": lambda a, b: ~(a == b),
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}


@pytest.mark.parametrize("kind", ["f32", "f64", "f16", "bf16"])
def test_float_comparisons(device: PtxDevice, kind: str) -> None:
    if kind in ("f16", "bf16"):
        format, bits = (F16, f16_bits) if kind == "f16" else (BF16, bf16_bits)
        operands = [bits(0), bits(1)]
        a, b = (as_float(operand, format) for operand in operands)
    else:
        a, b = (f32(place).astype(np.float32 if kind == "f32" else np.float64) for place in range(2))
        operands = [a, b]
    for name, compare in FLOAT_COMPARISONS.items():
        code = f"setp.{name}.{kind} %p0, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p0;"
        assert (run(device, code, operands, np.uint32) == compare(a, b)).all(), name


def test_packed_comparison(device: PtxDevice) -> None:
    a, b = f16_bits(0), f16_bits(1)
    packed = [value.astype(np.uint32) | np.roll(value, 5).astype(np.uint32) << 16 for value in (a, b)]
    code = "setp.lt.f16x2 %p0|%p1, {a}, {b}; selp.u32 %t0, 1, 0, %p0; selp.u32 %t1, 2, 0, %p1; or.b32 {d}, %t0, %t1;"
    low = as_float(a, F16) < as_float(b, F16)
    assert (run(device, code, packed, np.uint32) == low + 2 * np.roll(low, 5)).all()


# ---- conversions -----------------------------------------------------------------------------------------------------


def narrowed(values: np.ndarray, format: Format, mode: str = "rn") -> np.ndarray:
    return by_rule(lambda a: a, _keep_special(format), format, mode, values)


def _keep_special(format: Format) -> Callable[[float], float]:
    return lambda a: a


@pytest.mark.parametrize(
    ("code", "format", "mode"),
    [
        ("cvt.rn.f16.f32", F16, "rn"),
        ("cvt.rz.f16.f32", F16, "rz"),
        ("cvt.rn.bf16.f32", BF16, "rn"),
        ("cvt.rz.bf16.f32", BF16, "rz"),
    ],
)
def test_narrowing(device: PtxDevice, code: str, format: Format, mode: str) -> None:
    rng = np.random.default_rng(11)
    halves = as_float(f16_bits(0)[144:], F16)[:150]
    # Ties: half a unit above a representable number, and just beside.
    ties = [float(h * (1 + 2.0**-11)) for h in halves] if format is F16 else [float(h * (1 + 2.0**-8)) for h in halves]
    near = np.nextafter(np.array(ties, np.float32), np.float32(0))
    values = np.concatenate(
        [f32(0), np.array(ties, np.float32), near, rng.uniform(60000, 70000, 50).astype(np.float32)]
    )
    got = run(device, f"{code} {{d}}, {{a}};", [values], np.uint16)
    assert_same(code, got, narrowed(values, format, mode), format, values)


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_f64_to_f32(device: PtxDevice, mode: str) -> None:
    values = f32(0).astype(np.float64) * (1 + np.random.default_rng(5).random(COUNT) * 1e-7)
    got = run(device, f"cvt.{mode}.f32.f64 {{d}}, {{a}};", [values], np.float32)
    assert_same(mode, got, narrowed(values, F32, mode), F32, values)


def test_widening(device: PtxDevice) -> None:
    for kind, format, bits in (("f16", F16, f16_bits(0)), ("bf16", BF16, bf16_bits(0))):
        got = run(device, f"cvt.f32.{kind} {{d}}, {{a}};", [bits], np.float32)
        with np.errstate(invalid="ignore"):
            assert_same(kind, got, as_float(bits, format).astype(np.float32), F32, bits)
    values = f32(0)
    got = run(device, "cvt.f64.f32 {d}, {a};", [values], np.float64)
    assert_same("f64", got, values.astype(np.float64), F64, values)


@pytest.mark.parametrize(
    ("code", "format", "shift"),
    [
        ("cvt.rn.f16x2.f32", F16, 16),
        ("cvt.rn.bf16x2.f32", BF16, 16),
        ("cvt.rn.satfinite.e4m3x2.f32", E4M3, 8),
        ("cvt.rn.satfinite.e5m2x2.f32", E5M2, 8),
    ],
)
def test_packing(device: PtxDevice, code: str, format: Format, shift: int) -> None:
    """The first operand goes to the upper part."""
    scale = np.float32(2.0**-4)
    a, b = (f32(place, spread=12) * scale for place in range(2))
    out = np.uint32 if shift == 16 else np.uint16
    got = run(device, f"{code} {{d}}, {{a}}, {{b}};", [a, b], out)
    parts = [small_bits(value, format) for value in (a, b)]
    want = (parts[0].astype(np.uint32) << shift | parts[1]).astype(out)
    nan = np.isnan(a) | np.isnan(b)
    assert (got[~nan] == want[~nan]).all()
    upper = (got[np.isnan(a)] >> shift).astype(f"u{shift // 8}")
    assert (upper == (0x7FFF if shift == 16 else 0x7F)).all()


def test_packing_with_relu_and_saturation(device: PtxDevice) -> None:
    a, b = (np.concatenate([f32(place), np.array([65519, 65520, 1e38, -1e38], np.float32)]) for place in range(2))
    positive = [np.where((x > 0) | np.isnan(x), x, np.float32(0)) for x in (a, b)]
    high, low = (narrowed(x, F16) for x in positive)
    got = run(device, "cvt.rn.relu.f16x2.f32 {d}, {a}, {b};", [a, b], np.uint32)
    assert_same("relu", (got >> 16).astype(np.uint16), high, F16, a)
    assert_same("relu", got.astype(np.uint16), low, F16, b)
    got = run(device, "cvt.rn.satfinite.f16x2.f32 {d}, {a}, {b};", [a, b], np.uint32)
    assert_same("satfinite", (got >> 16).astype(np.uint16), narrowed(np.clip(a, -65504, 65504), F16), F16, a)


def small_bits(values: np.ndarray, format: Format) -> np.ndarray:
    """Rounded to a small float; e4m3 and e5m2 saturate. NaN gives 0 (to be left out of comparisons)."""
    out = []
    for value in values.tolist():
        if math.isnan(value):
            out.append(0)
            continue
        rounded = round_exact(Fraction(value), format) if math.isfinite(value) else value
        if isinstance(rounded, float) and format.bits == 8:
            rounded = math.copysign(1, rounded) * format.largest if rounded > 0 else -format.largest
            rounded = Fraction(rounded)
        out.append(encode(rounded, format, math.copysign(1, value) < 0))
    return np.array(out, f"u{format.bits // 8}")


@pytest.mark.parametrize(("kind", "format"), [("e4m3x2", E4M3), ("e5m2x2", E5M2)])
def test_small_floats_to_f16(device: PtxDevice, kind: str, format: Format) -> None:
    """All 256 values of both halves; encoding what comes out gives the bits back."""
    bits = np.arange(256, dtype=np.uint16)
    source = bits | bits[::-1] << 8
    got = run(device, f"cvt.rn.f16x2.{kind} {{d}}, {{a}};", [source], np.uint32)
    for part, octets in (((got & 0xFFFF).astype(np.uint16), bits), ((got >> 16).astype(np.uint16), bits[::-1])):
        value = part.view(np.float16).astype(np.float64)
        for octet, number in zip(octets.tolist(), value.tolist(), strict=True):
            if octet & 0x7F > (0x7E if format is E4M3 else 0x7C):
                assert math.isnan(number)
            elif math.isinf(number):
                assert (format, octet & 0x7F) == (E5M2, 0x7C)
            else:
                assert encode(Fraction(number), format, math.copysign(1, number) < 0) == octet
    if format is E4M3:
        back = run(device, "cvt.rn.satfinite.e4m3x2.f16x2 {d}, {a};", [got], np.uint16)
        finite = ((source & 0x7F) != 0x7F) & ((source >> 8 & 0x7F) != 0x7F)
        assert (back[finite] == source[finite]).all()


def test_tf32(device: PtxDevice) -> None:
    """Nearest, ties away from zero, 10 bits of fraction."""
    values = f32(0)[144:]
    got = run(device, "cvt.rna.tf32.f32 {d}, {a};", [values], np.uint32).view(np.float32)
    for value, rounded in zip(values.tolist(), got.tolist(), strict=True):
        if value == 0 or abs(value) < 2.0**-120:
            continue
        exponent = math.floor(math.log2(abs(value)))
        unit = Fraction(2) ** (exponent - 10)
        steps = abs(Fraction(value)) / unit
        assert abs(Fraction(rounded)) == math.floor(steps + Fraction(1, 2)) * unit


@pytest.mark.parametrize("to", ["s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"])
@pytest.mark.parametrize("of", ["f32", "f64", "f16"])
def test_float_to_integer(device: PtxDevice, to: str, of: str) -> None:
    bits = int(to[1:])
    low, high = (0, 2**bits - 1) if to[0] == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    rng = np.random.default_rng(9)
    plain = np.concatenate(
        [f32(0)[:100], np.arange(-5, 5, 0.25), rng.uniform(-300, 300, 60), rng.uniform(-1e20, 1e20, 40)]
    )
    if of == "f16":
        with np.errstate(over="ignore"):
            source = plain.astype(np.float16).view(np.uint16)
        values = source.view(np.float16).astype(np.float64)
    else:
        source = plain.astype(np.float32 if of == "f32" else np.float64)
        values = source.astype(np.float64)
    modes: dict[str, Callable[[Fraction], int]] = {
        "rni": round,
        "rzi": math.trunc,
        "rmi": math.floor,
        "rpi": math.ceil,
    }
    nan = 1 << (bits - 1) if of == "f64" or bits == 64 else 0
    out = f"u{max(bits, 16) // 8}"
    for mode, rounding in modes.items():
        want = []
        for value in values.tolist():
            if math.isnan(value):
                whole = nan
            elif math.isinf(value):
                whole = high if value > 0 else low
            else:
                whole = min(max(rounding(Fraction(value)), low), high)
            # An 8-bit result sits extended in a 16-bit register.
            if to[0] == "s" and whole >> (bits - 1) == 1:
                whole -= 1 << bits
            want.append(whole & (2 ** max(bits, 16) - 1))
        got = run(device, f"cvt.{mode}.{to}.{of} {{d}}, {{a}};", [source], out)
        assert got.tolist() == want, mode


@pytest.mark.parametrize("of", ["s32", "u32", "s64", "u64", "s16", "u16"])
@pytest.mark.parametrize("to", ["f32", "f64", "f16"])
def test_integer_to_float(device: PtxDevice, to: str, of: str) -> None:
    bits = int(of[1:])
    rng = np.random.default_rng(13)
    edges = [
        0,
        1,
        2,
        (1 << 24) + 1,
        (1 << 25) + 3,
        (1 << 53) + 1,
        (1 << bits) - 1,
        1 << (bits - 1),
        (1 << (bits - 1)) - 1,
    ]
    numbers = [edge & ((1 << bits) - 1) for edge in edges] + rng.integers(0, 1 << bits, 200, dtype=np.uint64).tolist()
    numbers += [(1 << shift) - 1 & ((1 << bits) - 1) for shift in range(bits)]
    source = np.array(numbers, np.uint64).astype(f"u{bits // 8}")
    format = {"f32": F32, "f64": F64, "f16": F16}[to]
    signed = source.view(f"i{bits // 8}") if of[0] == "s" else source
    want = np.array(
        [encode(round_exact(Fraction(int(v)), format), format) for v in signed.tolist()], f"u{format.bits // 8}"
    )
    got = run(device, f"cvt.rn.{to}.{of} {{d}}, {{a}};", [source], f"u{format.bits // 8}")
    assert_same(f"{to}.{of}", got, want, format, source)
    if to == "f32" and bits == 32:
        for mode in ("rz", "rm", "rp"):
            want = np.array([encode(round_exact(Fraction(int(v)), F32, mode), F32) for v in signed.tolist()], np.uint32)
            assert_same(mode, run(device, f"cvt.{mode}.f32.{of} {{d}}, {{a}};", [source], np.uint32), want, F32, source)


def test_rounding_to_integral_and_saturating(device: PtxDevice) -> None:
    values = f32(0, spread=6)
    for mode, function in (("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)):
        got = run(device, f"cvt.{mode}.f32.f32 {{d}}, {{a}};", [values], np.float32)
        assert_same(mode, got, function(values), F32, values)
    clipped = np.where(values > 0, np.minimum(values, np.float32(1)), np.float32(0))
    assert_same("sat", run(device, "cvt.sat.f32.f32 {d}, {a};", [values], np.float32), clipped, F32, values)
    got = run(device, "cvt.ftz.f32.f32 {d}, {a};", [values], np.float32)
    assert_same("ftz", got, flushed(values), F32, values)


@pytest.mark.parametrize(
    "code",
    [
        "add.rz.f64 {d}, {a}, {a};",
        "cvt.rp.f16.f32 {d}, {a};",
        "min.f32 {d}, {a}, {a}, {a};",
        "atom.global.add.f16 {d}, [%d11], {a};",
        "mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {{{d}}}, {{{a}}}, {{{a}}}, {{{a}}};",
        "frobnicate.u32 {d}, {a};",
        "tex.1d.v4.s32.s32 {d}, {a};",
    ],
)
def test_unknown_forms_quote_the_line(device: PtxDevice, code: str) -> None:
    width = np.float64 if "f64" in code else np.uint32
    with pytest.raises(PtxError) as caught:
        run(device, code, [np.zeros(4, width)], np.uint16 if "f16" in code else width)
    assert caught.value.kind == "unsupported"
    assert caught.value.text.split()[0] == code.split()[0]
    assert caught.value.kernel == "k"
    assert caught.value.line is not None
