"""Integer, logic, shift, bit-field and comparison instructions against Python's own integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from numba_engine.backends.ptx import PtxDevice
from tests.ptx.snippets import run

EDGES = {
    bits: [0, 1, 2, 3, 31, 32, 63, (1 << (bits - 1)) - 1, 1 << (bits - 1), (1 << bits) - 1] for bits in (16, 32, 64)
}


def values(bits: int, place: int, count: int = 256) -> np.ndarray:
    """Edge values against each other, then random ones; a different order for each operand."""
    rng = np.random.default_rng(bits * 10 + place)
    edges = EDGES[bits]
    crossed = [edges[(i // len(edges) ** place) % len(edges)] for i in range(100)]
    rest = rng.integers(0, 1 << bits, count - 100, dtype=np.uint64)
    small = rng.integers(0, 70, 40, dtype=np.uint64)
    rest[:40] = small
    return np.concatenate([np.array(crossed, np.uint64), rest]).astype(f"u{bits // 8}")


def signed(value: int, bits: int) -> int:
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def check(device: PtxDevice, code: str, bits: tuple[int, ...], out_bits: int, expected: Callable[..., int]) -> None:
    operands = [values(width, place) for place, width in enumerate(bits)]
    got = run(device, code, operands, f"u{out_bits // 8}")
    mask = (1 << out_bits) - 1
    want = [expected(*map(int, row)) & mask for row in zip(*operands, strict=True)]
    wrong = [(row, int(g), w) for *row, g, w in zip(*operands, got, want, strict=True) if int(g) != w]
    assert not wrong, f"{code}: {len(wrong)} wrong, first (operands, got, want) {wrong[0]}"


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def clamp(value: int, low: int, high: int) -> int:
    return min(max(value, low), high)


ARITHMETIC: list[tuple[str, Callable[[int, int], int]]] = [
    ("add", lambda a, b: a + b),
    ("sub", lambda a, b: a - b),
    ("mul.lo", lambda a, b: a * b),
    ("min", min),
    ("max", max),
]


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize(("name", "function"), ARITHMETIC, ids=[name for name, _ in ARITHMETIC])
def test_arithmetic(device: PtxDevice, kind: str, name: str, function: Callable[[int, int], int]) -> None:
    bits = int(kind[1:])
    see = (lambda v: signed(v, bits)) if kind[0] == "s" else (lambda v: v)
    check(device, f"{name}.{kind} {{d}}, {{a}}, {{b}};", (bits, bits), bits, lambda a, b: function(see(a), see(b)))


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32"])
def test_wide_products(device: PtxDevice, kind: str) -> None:
    bits = int(kind[1:])
    see = (lambda v: signed(v, bits)) if kind[0] == "s" else (lambda v: v)
    check(device, f"mul.wide.{kind} {{d}}, {{a}}, {{b}};", (bits, bits), 2 * bits, lambda a, b: see(a) * see(b))
    check(
        device,
        f"mad.wide.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
        (bits, bits, 2 * bits),
        2 * bits,
        lambda a, b, c: see(a) * see(b) + c,
    )


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_high_products(device: PtxDevice, kind: str) -> None:
    bits = int(kind[1:])
    see = (lambda v: signed(v, bits)) if kind[0] == "s" else (lambda v: v)
    check(device, f"mul.hi.{kind} {{d}}, {{a}}, {{b}};", (bits, bits), bits, lambda a, b: see(a) * see(b) >> bits)


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_mad_and_division(device: PtxDevice, kind: str) -> None:
    bits = int(kind[1:])
    see = (lambda v: signed(v, bits)) if kind[0] == "s" else (lambda v: v)
    check(device, f"mad.lo.{kind} {{d}}, {{a}}, {{b}}, {{c}};", (bits,) * 3, bits, lambda a, b, c: a * b + c)
    check(
        device,
        f"mad.hi.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
        (bits,) * 3,
        bits,
        lambda a, b, c: (see(a) * see(b) >> bits) + c,
    )
    ones = (1 << bits) - 1
    check(
        device,
        f"div.{kind} {{d}}, {{a}}, {{b}};",
        (bits, bits),
        bits,
        lambda a, b: truncated(see(a), see(b)) if b else ones,
    )
    check(
        device,
        f"rem.{kind} {{d}}, {{a}}, {{b}};",
        (bits, bits),
        bits,
        lambda a, b: see(a) - truncated(see(a), see(b)) * see(b) if b else a,
    )


CASES_32: list[tuple[str, int, Callable[..., int]]] = [
    ("add.sat.s32 {d}, {a}, {b};", 2, lambda a, b: clamp(signed(a, 32) + signed(b, 32), -(2**31), 2**31 - 1)),
    ("sub.sat.s32 {d}, {a}, {b};", 2, lambda a, b: clamp(signed(a, 32) - signed(b, 32), -(2**31), 2**31 - 1)),
    ("mul24.lo.u32 {d}, {a}, {b};", 2, lambda a, b: (a & 0xFFFFFF) * (b & 0xFFFFFF)),
    ("mul24.lo.s32 {d}, {a}, {b};", 2, lambda a, b: signed(a, 24) * signed(b, 24)),
    ("mad24.lo.u32 {d}, {a}, {b}, {c};", 3, lambda a, b, c: (a & 0xFFFFFF) * (b & 0xFFFFFF) + c),
    ("mad24.lo.s32 {d}, {a}, {b}, {c};", 3, lambda a, b, c: signed(a, 24) * signed(b, 24) + c),
    ("abs.s32 {d}, {a};", 1, lambda a: abs(signed(a, 32))),
    ("neg.s32 {d}, {a};", 1, lambda a: -a),
    ("sad.s32 {d}, {a}, {b}, {c};", 3, lambda a, b, c: abs(signed(a, 32) - signed(b, 32)) + c),
    ("sad.u32 {d}, {a}, {b}, {c};", 3, lambda a, b, c: abs(a - b) + c),
    ("and.b32 {d}, {a}, {b};", 2, lambda a, b: a & b),
    ("or.b32 {d}, {a}, {b};", 2, lambda a, b: a | b),
    ("xor.b32 {d}, {a}, {b};", 2, lambda a, b: a ^ b),
    ("not.b32 {d}, {a};", 1, lambda a: ~a),
    ("cnot.b32 {d}, {a};", 1, lambda a: int(a == 0)),
    ("shl.b32 {d}, {a}, {b};", 2, lambda a, b: a << b if b < 32 else 0),
    ("shr.u32 {d}, {a}, {b};", 2, lambda a, b: a >> b if b < 32 else 0),
    ("shr.s32 {d}, {a}, {b};", 2, lambda a, b: signed(a, 32) >> min(b, 31)),
    ("shr.s32 {d}, {a}, 40;", 1, lambda a: signed(a, 32) >> 31),
    ("shf.l.wrap.b32 {d}, {a}, {b}, {c};", 3, lambda a, b, c: (b << 32 | a) << (c & 31) >> 32),
    ("shf.l.clamp.b32 {d}, {a}, {b}, {c};", 3, lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32),
    ("shf.r.wrap.b32 {d}, {a}, {b}, {c};", 3, lambda a, b, c: (b << 32 | a) >> (c & 31)),
    ("shf.r.clamp.b32 {d}, {a}, {b}, {c};", 3, lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    ("popc.b32 {d}, {a};", 1, lambda a: a.bit_count()),
    ("clz.b32 {d}, {a};", 1, lambda a: 32 - a.bit_length()),
    ("brev.b32 {d}, {a};", 1, lambda a: int(f"{a:032b}"[::-1], 2)),
    ("bfind.u32 {d}, {a};", 1, lambda a: a.bit_length() - 1),
    ("bfind.shiftamt.u32 {d}, {a};", 1, lambda a: 32 - a.bit_length() if a else -1),
    ("bfind.s32 {d}, {a};", 1, lambda a: (a if a < 2**31 else ~a & 0xFFFFFFFF).bit_length() - 1),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0xEA;", 3, lambda a, b, c: a & b | c),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0x96;", 3, lambda a, b, c: a ^ b ^ c),
    ("lop3.b32 {d}, {a}, {b}, {c}, 0x1B;", 3, lambda a, b, c: sum((0x1B >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))),  # noqa: E501
    ("bmsk.clamp.b32 {d}, {a}, {b};", 2, lambda a, b: ((1 << min(b, 32)) - 1) << min(a, 32)),
    ("bmsk.wrap.b32 {d}, {a}, {b};", 2, lambda a, b: ((1 << (b & 31)) - 1) << (a & 31)),
    ("mov.b32 {d}, {a};", 1, lambda a: a),
    ("mov.u32 {d}, 0x80000001;", 1, lambda a: 0x80000001),
    ("mov.u32 {d}, -2;", 1, lambda a: -2),
    ("cvt.u32.u8 {d}, {a};", 1, lambda a: a & 0xFF),
    ("cvt.s32.s8 {d}, {a};", 1, lambda a: signed(a, 8)),
    ("cvt.u32.u16 {d}, {a};", 1, lambda a: a & 0xFFFF),
    ("cvt.s16.s32 {d}, {a};", 1, lambda a: signed(a, 16)),
    ("cvt.u8.u32 {d}, {a};", 1, lambda a: a & 0xFF),
    ("cvt.sat.s8.s32 {d}, {a};", 1, lambda a: clamp(signed(a, 32), -128, 127)),
    ("cvt.sat.u8.s32 {d}, {a};", 1, lambda a: clamp(signed(a, 32), 0, 255)),
    ("cvt.sat.u32.s32 {d}, {a};", 1, lambda a: max(signed(a, 32), 0)),
    ("cvt.sat.s32.u32 {d}, {a};", 1, lambda a: min(a, 2**31 - 1)),
    ("cvt.pack.sat.s8.s32.b32 {d}, {a}, {b}, {c};", 3, lambda a, b, c: (clamp(signed(a, 32), -128, 127) & 255) << 8 | clamp(signed(b, 32), -128, 127) & 255 | c << 16),  # noqa: E501
    ("cvt.pack.sat.u16.s32 {d}, {a}, {b};", 2, lambda a, b: clamp(signed(a, 32), 0, 65535) << 16 | clamp(signed(b, 32), 0, 65535)),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("code", "count", "expected"), CASES_32, ids=[code for code, _, _ in CASES_32])
def test_32_bits(device: PtxDevice, code: str, count: int, expected: Callable[..., int]) -> None:
    check(device, code, (32,) * count, 32, expected)


CASES_MIXED: list[tuple[str, tuple[int, ...], int, Callable[..., int]]] = [
    ("shl.b64 {d}, {a}, {b};", (64, 32), 64, lambda a, b: a << b if b < 64 else 0),
    ("shr.u64 {d}, {a}, {b};", (64, 32), 64, lambda a, b: a >> b if b < 64 else 0),
    ("shr.s64 {d}, {a}, {b};", (64, 32), 64, lambda a, b: signed(a, 64) >> min(b, 63)),
    ("shl.b16 {d}, {a}, {b};", (16, 32), 16, lambda a, b: a << b if b < 16 else 0),
    ("shr.s16 {d}, {a}, {b};", (16, 32), 16, lambda a, b: signed(a, 16) >> min(b, 15)),
    ("and.b64 {d}, {a}, {b};", (64, 64), 64, lambda a, b: a & b),
    ("not.b64 {d}, {a};", (64,), 64, lambda a: ~a),
    ("xor.b16 {d}, {a}, {b};", (16, 16), 16, lambda a, b: a ^ b),
    ("abs.s64 {d}, {a};", (64,), 64, lambda a: abs(signed(a, 64))),
    ("neg.s64 {d}, {a};", (64,), 64, lambda a: -a),
    ("neg.s16 {d}, {a};", (16,), 16, lambda a: -a),
    ("popc.b64 {d}, {a};", (64,), 32, lambda a: a.bit_count()),
    ("clz.b64 {d}, {a};", (64,), 32, lambda a: 64 - a.bit_length()),
    ("brev.b64 {d}, {a};", (64,), 64, lambda a: int(f"{a:064b}"[::-1], 2)),
    ("bfind.u64 {d}, {a};", (64,), 32, lambda a: a.bit_length() - 1),
    ("bfind.s64 {d}, {a};", (64,), 32, lambda a: (a if a < 2**63 else ~a & (2**64 - 1)).bit_length() - 1),
    ("cvt.s64.s32 {d}, {a};", (32,), 64, lambda a: signed(a, 32)),
    ("cvt.u64.u32 {d}, {a};", (32,), 64, lambda a: a),
    ("cvt.u32.u64 {d}, {a};", (64,), 32, lambda a: a),
    ("cvt.s64.s8 {d}, {a};", (32,), 64, lambda a: signed(a, 8)),
    ("cvt.u16.u64 {d}, {a};", (64,), 16, lambda a: a),
    ("cvt.sat.s32.s64 {d}, {a};", (64,), 32, lambda a: clamp(signed(a, 64), -(2**31), 2**31 - 1)),
    ("cvt.sat.u16.u64 {d}, {a};", (64,), 16, lambda a: min(a, 65535)),
    ("mov.b64 {d}, {{{a}, {b}}};", (32, 32), 64, lambda a, b: b << 32 | a),
    ("mov.b64 {{%t0, {d}}}, {a};", (64,), 32, lambda a: a >> 32),
    ("mov.b64 {{{d}, _}}, {a};", (64,), 32, lambda a: a),
    ("mov.b32 {d}, {{{a}, {b}}};", (16, 16), 32, lambda a, b: b << 16 | a),
    ("mov.b32 {{%h6, {d}}}, {a};", (32,), 16, lambda a: a >> 16),
    ("mov.b64 {d}, {{{a}, {b}, {c}, {e}}};", (16, 16, 16, 16), 64, lambda a, b, c, e: e << 48 | c << 32 | b << 16 | a),
]


@pytest.mark.parametrize(("code", "bits", "out", "expected"), CASES_MIXED, ids=[case[0] for case in CASES_MIXED])
def test_mixed_widths(
    device: PtxDevice, code: str, bits: tuple[int, ...], out: int, expected: Callable[..., int]
) -> None:
    check(device, code, bits, out, expected)


def test_extended_precision(device: PtxDevice) -> None:
    """64-bit sums, differences and products from 32-bit halves and the carry flag."""
    halves = "mov.b64 {{%t0, %t1}}, {a}; mov.b64 {{%t2, %t3}}, {b}; "
    join = "mov.b64 {d}, {{%t4, %t5}};"
    cases: list[tuple[str, Callable[[int, int], int]]] = [
        ("add.cc.u32 %t4, %t0, %t2; addc.u32 %t5, %t1, %t3;", lambda a, b: a + b),
        ("sub.cc.u32 %t4, %t0, %t2; subc.u32 %t5, %t1, %t3;", lambda a, b: a - b),
        (
            "mov.u32 %t5, 0; mad.lo.cc.u32 %t4, %t0, %t2, %t0; madc.hi.u32 %t5, %t0, %t2, %t1;",
            lambda a, b: (a & 0xFFFFFFFF) * (b & 0xFFFFFFFF) + a,
        ),
    ]
    for code, expected in cases:
        check(device, halves + code + join, (64, 64), 64, expected)
    # Three words: the middle one takes a carry in and gives one out.
    code = halves + (
        "add.cc.u32 %t6, %t0, 0xffffffff; addc.cc.u32 %t4, %t1, %t2; addc.u32 %t5, %t3, 0;mov.b64 {d}, {{%t4, %t5}};"
    )
    check(device, code, (64, 64), 64, lambda a, b: (a + 0xFFFFFFFF + (b << 32)) >> 32)


def extract(a: int, position: int, length: int, bits: int, is_signed: bool) -> int:
    """The ISA's own loop over the bits of the field."""
    position, length = position & 255, length & 255
    top = bits - 1
    sign = (a >> min(position + length - 1, top)) & 1 if is_signed and length else 0
    result = 0
    for i in range(bits):
        bit = (a >> (position + i)) & 1 if i < length and position + i <= top else sign
        result |= bit << i
    return result


def insert(a: int, b: int, position: int, length: int, bits: int) -> int:
    position, length = position & 255, length & 255
    result = b
    for i in range(length):
        if position + i >= bits:
            break
        result = result & ~(1 << (position + i)) | ((a >> i & 1) << (position + i))
    return result


@pytest.mark.parametrize("kind", ["u32", "s32", "u64", "s64"])
def test_bit_fields(device: PtxDevice, kind: str) -> None:
    bits = int(kind[1:])
    check(
        device,
        f"bfe.{kind} {{d}}, {{a}}, {{b}}, {{c}};",
        (bits, 32, 32),
        bits,
        lambda a, b, c: extract(a, b, c, bits, kind[0] == "s"),
    )
    if kind[0] == "u":
        check(
            device,
            f"bfi.b{bits} {{d}}, {{a}}, {{b}}, {{c}}, {{e}};",
            (bits, bits, 32, 32),
            bits,
            lambda a, b, c, e: insert(a, b, c, e, bits),
        )


def permute(a: int, b: int, selector: int) -> int:
    octets = (b << 32 | a).to_bytes(8, "little")
    out = []
    for place in range(4):
        nibble = selector >> (4 * place) & 15
        octet = octets[nibble & 7]
        out.append((0xFF if octet & 0x80 else 0) if nibble & 8 else octet)
    return int.from_bytes(bytes(out), "little")


def test_permute(device: PtxDevice) -> None:
    check(device, "prmt.b32 {d}, {a}, {b}, {c};", (32, 32, 32), 32, permute)
    check(device, "prmt.b32 {d}, {a}, {b}, 0x7531;", (32, 32), 32, lambda a, b: permute(a, b, 0x7531))
    check(
        device,
        "prmt.b32.f4e {d}, {a}, {b}, {c};",
        (32, 32, 32),
        32,
        lambda a, b, c: (b << 32 | a) >> 8 * (c & 3),
    )


@pytest.mark.parametrize("a_kind", ["u32", "s32"])
@pytest.mark.parametrize("b_kind", ["u32", "s32"])
def test_dot_products(device: PtxDevice, a_kind: str, b_kind: str) -> None:
    def part(value: int, place: int, width: int, kind: str) -> int:
        bits = value >> (place * width) & ((1 << width) - 1)
        return signed(bits, width) if kind[0] == "s" else bits

    check(
        device,
        f"dp4a.{a_kind}.{b_kind} {{d}}, {{a}}, {{b}}, {{c}};",
        (32, 32, 32),
        32,
        lambda a, b, c: sum(part(a, i, 8, a_kind) * part(b, i, 8, b_kind) for i in range(4)) + c,
    )
    for half, first in (("lo", 0), ("hi", 2)):
        check(
            device,
            f"dp2a.{half}.{a_kind}.{b_kind} {{d}}, {{a}}, {{b}}, {{c}};",
            (32, 32, 32),
            32,
            lambda a, b, c, first=first: (
                sum(part(a, i, 16, a_kind) * part(b, first + i, 8, b_kind) for i in range(2)) + c
            ),
        )


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
}


@pytest.mark.parametrize("kind", ["u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_comparisons(device: PtxDevice, kind: str) -> None:
    bits = int(kind[1:])
    see = (lambda v: signed(v, bits)) if kind[0] == "s" else (lambda v: v)
    for name, compare in COMPARISONS.items():
        check(
            device,
            f"setp.{name}.{kind} %p0, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p0;",
            (bits, bits),
            32,
            lambda a, b, compare=compare: compare(see(a), see(b)),
        )
    if kind[0] == "u":
        for name, alias in (("lo", "lt"), ("ls", "le"), ("hi", "gt"), ("hs", "ge")):
            check(
                device,
                f"setp.{name}.{kind} %p0, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, %p0;",
                (bits, bits),
                32,
                lambda a, b, alias=alias: COMPARISONS[alias](a, b),
            )


@pytest.mark.parametrize(("name", "combine"), [("and", min), ("or", max), ("xor", lambda a, b: a ^ b)])
@pytest.mark.parametrize("negated", ["", "!"])
def test_combined_comparisons(device: PtxDevice, name: str, combine: Callable[[int, int], int], negated: str) -> None:
    """p|q = (a < b) op c | !(a < b) op c."""

    def expected(a: int, b: int, c: int) -> int:
        other = int((c & 1 == 0) if negated else (c & 1 == 1))
        return combine(int(a < b), other) | combine(int(a >= b), other) << 1

    check(
        device,
        f"and.b32 %t0, {{c}}, 1; setp.ne.u32 %p2, %t0, 0; setp.lt.{name}.u32 %p0|%p1, {{a}}, {{b}}, {negated}%p2;"
        "selp.u32 %t1, 1, 0, %p0; selp.u32 %t2, 2, 0, %p1; or.b32 {d}, %t1, %t2;",
        (32, 32, 32),
        32,
        expected,
    )


def test_predicate_logic_and_guards(device: PtxDevice) -> None:
    prologue = "setp.lt.u32 %p0, {a}, {b}; setp.lt.u32 %p1, {b}, {c};"
    cases: list[tuple[str, Callable[[bool, bool], bool]]] = [
        ("and.pred %p2, %p0, %p1;", lambda p, q: p and q),
        ("or.pred %p2, %p0, !%p1;", lambda p, q: p or not q),
        ("xor.pred %p2, %p0, %p1;", lambda p, q: p != q),
        ("not.pred %p2, %p0;", lambda p, q: not p),
        ("mov.pred %p2, %p1;", lambda p, q: q),
    ]
    for code, expected in cases:
        check(
            device,
            f"{prologue} {code} mov.u32 {{d}}, 7; @%p2 mov.u32 {{d}}, 8; @!%p2 add.u32 {{d}}, {{d}}, 2;",
            (32, 32, 32),
            32,
            lambda a, b, c, expected=expected: 8 if expected(a < b, b < c) else 9,
        )


def test_selection(device: PtxDevice) -> None:
    check(
        device,
        "setp.ge.u32 %p0, {a}, {b}; selp.b32 {d}, {a}, {b}, !%p0;",
        (32, 32),
        32,
        lambda a, b: b if a >= b else a,
    )
    check(device, "slct.u32.s32 {d}, {a}, {b}, {c};", (32, 32, 32), 32, lambda a, b, c: a if c < 2**31 else b)
    check(device, "set.lt.u32.s32 {d}, {a}, {b};", (32, 32), 32, lambda a, b: -int(signed(a, 32) < signed(b, 32)))
    check(device, "set.gt.f32.u32 {d}, {a}, {b};", (32, 32), 32, lambda a, b: 0x3F800000 if a > b else 0)
