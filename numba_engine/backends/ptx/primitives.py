"""Scalar arithmetic of the PTX ISA as NumPy ufuncs, compiled on first use and cached on disk.

NumPy has no fused multiply-add, no round-to-odd, no bit fields. Each function here is one lane's arithmetic; ``get``
turns it into a ufunc for given operand types.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, float64, int8, int16, int32, int64, njit, types, uint8, uint16, uint32, uint64, vectorize
from numba.extending import intrinsic

Ufunc = Callable[..., Any]

_TYPES = {
    "u8": uint8,
    "u16": uint16,
    "u32": uint32,
    "u64": uint64,
    "s8": int8,
    "s16": int16,
    "s32": int32,
    "s64": int64,
    "f32": float32,
    "f64": float64,
    "pred": types.boolean,
}


@cache
def get(name: str, signature: str) -> Ufunc:
    """The ufunc of the function ``name`` below. ``signature`` is "result(operand,operand)" in PTX types."""
    result, _, rest = signature.rstrip(")").partition("(")
    declared = _TYPES[result](*(_TYPES[kind] for kind in rest.split(",")))
    ufunc: Ufunc = vectorize([declared], cache=True)(globals()[name])
    return ufunc


# ---- machine operations ----------------------------------------------------------------------------------------------


@intrinsic
def fused_multiply_add(typingctx, a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c rounded once."""
    del typingctx, b, c

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        del context, signature
        return builder.fma(*args)

    return a(a, a, a), generate


def _bitcast(result, source):  # type: ignore[no-untyped-def]
    @intrinsic
    def cast(typingctx, value):  # type: ignore[no-untyped-def]
        del typingctx, value

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            return builder.bitcast(args[0], context.get_value_type(signature.return_type))

        return result(source), generate

    return cast


_bits32 = _bitcast(uint32, float32)
_float32 = _bitcast(float32, uint32)
_bits64 = _bitcast(uint64, float64)
_float64 = _bitcast(float64, uint64)


def _count_intrinsic(llvm_name: str) -> Any:
    @intrinsic
    def count(typingctx, value):  # type: ignore[no-untyped-def]
        del typingctx

        def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
            del context, signature
            kind = args[0].type
            extra = [ir.IntType(1)] if llvm_name == "ctlz" else []
            function = builder.module.declare_intrinsic(
                f"llvm.{llvm_name}", [kind], ir.FunctionType(kind, [kind, *extra])
            )
            return builder.call(function, [args[0], *(ir.Constant(ir.IntType(1), 0) for _ in extra)])

        return value(value), generate

    return count


_ctlz = _count_intrinsic("ctlz")
_ctpop = _count_intrinsic("ctpop")
_bitreverse = _count_intrinsic("bitreverse")


# ---- selection -------------------------------------------------------------------------------------------------------


def select(p, a, b):  # type: ignore[no-untyped-def]
    return a if p else b


# ---- integers --------------------------------------------------------------------------------------------------------


def mul_wide(a, b):  # type: ignore[no-untyped-def]
    return _widen(a) * _widen(b)


def mad_wide(a, b, c):  # type: ignore[no-untyped-def]
    return _widen(a) * _widen(b) + c


@intrinsic
def _widen(typingctx, value):  # type: ignore[no-untyped-def]
    """To twice the bits."""
    del typingctx
    result = {16: {True: int32, False: uint32}, 32: {True: int64, False: uint64}}[value.bitwidth][value.signed]

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = context.get_value_type(signature.return_type)
        return builder.sext(args[0], kind) if value.signed else builder.zext(args[0], kind)

    return result(value), generate


@intrinsic
def _high_product(typingctx, a, b):  # type: ignore[no-untyped-def]
    del typingctx, b

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        del context, signature
        width = a.bitwidth
        wide = ir.IntType(2 * width)
        extend = builder.sext if a.signed else builder.zext
        product = builder.mul(extend(args[0], wide), extend(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, width)), ir.IntType(width))

    return a(a, a), generate


def mul_hi(a, b):  # type: ignore[no-untyped-def]
    return _high_product(a, b)


def mad_hi(a, b, c):  # type: ignore[no-untyped-def]
    return _high_product(a, b) + c


def mad_lo(a, b, c):  # type: ignore[no-untyped-def]
    return a * b + c


def mul24_lo_u(a, b):  # type: ignore[no-untyped-def]
    return (a & uint32(0xFFFFFF)) * (b & uint32(0xFFFFFF))


def mul24_lo_s(a, b):  # type: ignore[no-untyped-def]
    return ((int64(a) << 40) >> 40) * ((int64(b) << 40) >> 40)


def mad24_lo_u(a, b, c):  # type: ignore[no-untyped-def]
    return (a & uint32(0xFFFFFF)) * (b & uint32(0xFFFFFF)) + c


def mad24_lo_s(a, b, c):  # type: ignore[no-untyped-def]
    return ((int64(a) << 40) >> 40) * ((int64(b) << 40) >> 40) + c


def add_sat(a, b):  # type: ignore[no-untyped-def]
    total = int64(a) + int64(b)
    return int32(min(max(total, int64(-0x80000000)), int64(0x7FFFFFFF)))


def sub_sat(a, b):  # type: ignore[no-untyped-def]
    total = int64(a) - int64(b)
    return int32(min(max(total, int64(-0x80000000)), int64(0x7FFFFFFF)))


def div_u(a, b):  # type: ignore[no-untyped-def]
    """Division by zero gives all ones, as the hardware does."""
    return a // b if b != 0 else ~b


def rem_u(a, b):  # type: ignore[no-untyped-def]
    return a % b if b != 0 else a


def div_s(a, b):  # type: ignore[no-untyped-def]
    """Truncates toward zero."""
    if b == 0:
        return ~b
    if b == -1:
        return -a
    quotient = a // b
    return quotient + 1 if quotient * b != a and (a < 0) != (b < 0) else quotient


def rem_s(a, b):  # type: ignore[no-untyped-def]
    if b == 0:
        return a
    if b == -1:
        return b - b
    quotient = a // b
    if quotient * b != a and (a < 0) != (b < 0):
        quotient += 1
    return a - quotient * b


def clz(a):  # type: ignore[no-untyped-def]
    return uint32(_ctlz(a))


def popc(a):  # type: ignore[no-untyped-def]
    return uint32(_ctpop(a))


def brev(a):  # type: ignore[no-untyped-def]
    return _bitreverse(a)


def bfind_u32(a):  # type: ignore[no-untyped-def]
    return uint32(31) - uint32(_ctlz(a)) if a != 0 else uint32(0xFFFFFFFF)


def bfind_u64(a):  # type: ignore[no-untyped-def]
    return uint32(63) - uint32(_ctlz(a)) if a != 0 else uint32(0xFFFFFFFF)


def bfind_s32(a):  # type: ignore[no-untyped-def]
    return bfind_u32_call(uint32(~a if a < 0 else a))


def bfind_s64(a):  # type: ignore[no-untyped-def]
    return bfind_u64_call(uint64(~a if a < 0 else a))


def bfe_u32(a, b, c):  # type: ignore[no-untyped-def]
    position, length = b & uint32(0xFF), c & uint32(0xFF)
    if length == 0 or position > 31:
        return uint32(0)
    field = a >> position
    return field if length >= 32 else field & ((uint32(1) << length) - uint32(1))


def bfe_s32(a, b, c):  # type: ignore[no-untyped-def]
    position, length = int64(b & uint32(0xFF)), int64(c & uint32(0xFF))
    if length == 0:
        return int32(0)
    sign = (int64(a) >> min(position + length - int64(1), int64(31))) & int64(1)
    field = (int64(uint32(a)) >> min(position, int64(63))) & ((int64(1) << min(length, int64(32))) - int64(1))
    kept = min(length, max(int64(32) - position, int64(0)))
    if sign:
        field |= int64(-1) << kept
    return int32(field)


def bfe_u64(a, b, c):  # type: ignore[no-untyped-def]
    position, length = uint64(b & uint32(0xFF)), uint64(c & uint32(0xFF))
    if length == 0 or position > 63:
        return uint64(0)
    field = a >> position
    return field if length >= 64 else field & ((uint64(1) << length) - uint64(1))


def bfe_s64(a, b, c):  # type: ignore[no-untyped-def]
    position, length = int64(b & uint32(0xFF)), int64(c & uint32(0xFF))
    if length == 0:
        return int64(0)
    sign = (a >> min(position + length - int64(1), int64(63))) & int64(1)
    kept = min(length, max(int64(64) - position, int64(0)))
    if kept == 0:
        return -sign
    field = int64(uint64(a) >> uint64(position))
    if kept < 64:
        field &= (int64(1) << kept) - int64(1)
        if sign:
            field |= int64(-1) << kept
    return field


def bfi_b32(a, b, c, d):  # type: ignore[no-untyped-def]
    """Insert the low ``d`` bits of a into b at bit c."""
    position, length = uint64(c & uint32(0xFF)), uint64(d & uint32(0xFF))
    if position > 31 or length == 0:
        return b
    mask = (((uint64(1) << min(length, uint64(32))) - uint64(1)) << position) & uint64(0xFFFFFFFF)
    return uint32((uint64(b) & ~mask) | ((uint64(a) << position) & mask))


def bfi_b64(a, b, c, d):  # type: ignore[no-untyped-def]
    position, length = uint64(c & uint32(0xFF)), uint64(d & uint32(0xFF))
    if position > 63 or length == 0:
        return b
    ones = ~uint64(0) if length >= 64 else (uint64(1) << length) - uint64(1)
    mask = ones << position
    return (b & ~mask) | ((a << position) & mask)


def prmt(a, b, selector):  # type: ignore[no-untyped-def]
    both = (uint64(b) << uint64(32)) | uint64(a)
    result = uint32(0)
    for index in range(4):
        nibble = (selector >> uint32(4 * index)) & uint32(15)
        byte = uint32(both >> (uint64(nibble & uint32(7)) * uint64(8))) & uint32(0xFF)
        if nibble & uint32(8):
            byte = uint32(0xFF) if byte & uint32(0x80) else uint32(0)
        result |= byte << uint32(8 * index)
    return result


def prmt_f4e(a, b, c):  # type: ignore[no-untyped-def]
    both = (uint64(b) << uint64(32)) | uint64(a)
    return uint32(both >> (uint64(c & uint32(3)) * uint64(8)))


def shf_l_wrap(a, b, c):  # type: ignore[no-untyped-def]
    both = (uint64(b) << uint64(32)) | uint64(a)
    return uint32((both << uint64(c & uint32(31))) >> uint64(32))


def shf_l_clamp(a, b, c):  # type: ignore[no-untyped-def]
    both = (uint64(b) << uint64(32)) | uint64(a)
    return uint32((both << uint64(min(c, uint32(32)))) >> uint64(32))


def shf_r_wrap(a, b, c):  # type: ignore[no-untyped-def]
    both = (uint64(b) << uint64(32)) | uint64(a)
    return uint32(both >> uint64(c & uint32(31)))


def shf_r_clamp(a, b, c):  # type: ignore[no-untyped-def]
    both = (uint64(b) << uint64(32)) | uint64(a)
    return uint32(both >> uint64(min(c, uint32(32))))


def lop3(a, b, c, table):  # type: ignore[no-untyped-def]
    result = uint32(0)
    for index in range(8):
        if table >> uint32(index) & uint32(1):
            term = a if index & 4 else ~a
            term &= b if index & 2 else ~b
            term &= c if index & 1 else ~c
            result |= term
    return result


def _dot4(a, b, c, a_signed, b_signed):  # type: ignore[no-untyped-def]
    total = int32(c)
    for index in range(4):
        shift = uint32(8 * index)
        x = (a >> shift) & uint32(0xFF)
        y = (b >> shift) & uint32(0xFF)
        total += (int32(int8(x)) if a_signed else int32(x)) * (int32(int8(y)) if b_signed else int32(y))
    return uint32(total)


def _dot2(a, b, c, half, a_signed, b_signed):  # type: ignore[no-untyped-def]
    total = int32(c)
    for index in range(2):
        x = (a >> uint32(16 * index)) & uint32(0xFFFF)
        y = (b >> uint32(8 * index + 16 * half)) & uint32(0xFF)
        total += (int32(int16(x)) if a_signed else int32(x)) * (int32(int8(y)) if b_signed else int32(y))
    return uint32(total)


_dot4_call = njit(inline="always")(_dot4)
_dot2_call = njit(inline="always")(_dot2)
bfind_u32_call = njit(inline="always")(bfind_u32)
bfind_u64_call = njit(inline="always")(bfind_u64)


def dp4a_uu(a, b, c):  # type: ignore[no-untyped-def]
    return _dot4_call(a, b, c, False, False)


def dp4a_us(a, b, c):  # type: ignore[no-untyped-def]
    return _dot4_call(a, b, c, False, True)


def dp4a_su(a, b, c):  # type: ignore[no-untyped-def]
    return _dot4_call(a, b, c, True, False)


def dp4a_ss(a, b, c):  # type: ignore[no-untyped-def]
    return _dot4_call(a, b, c, True, True)


def dp2a_lo_uu(a, b, c):  # type: ignore[no-untyped-def]
    return _dot2_call(a, b, c, 0, False, False)


def dp2a_lo_us(a, b, c):  # type: ignore[no-untyped-def]
    return _dot2_call(a, b, c, 0, False, True)


def dp2a_lo_su(a, b, c):  # type: ignore[no-untyped-def]
    return _dot2_call(a, b, c, 0, True, False)


def dp2a_lo_ss(a, b, c):  # type: ignore[no-untyped-def]
    return _dot2_call(a, b, c, 0, True, True)


def dp2a_hi_uu(a, b, c):  # type: ignore[no-untyped-def]
    return _dot2_call(a, b, c, 1, False, False)


def dp2a_hi_us(a, b, c):  # type: ignore[no-untyped-def]
    return _dot2_call(a, b, c, 1, False, True)


def dp2a_hi_su(a, b, c):  # type: ignore[no-untyped-def]
    return _dot2_call(a, b, c, 1, True, False)


def dp2a_hi_ss(a, b, c):  # type: ignore[no-untyped-def]
    return _dot2_call(a, b, c, 1, True, True)


# ---- float32 and float64 ---------------------------------------------------------------------------------------------


def fma(a, b, c):  # type: ignore[no-untyped-def]
    return fused_multiply_add(a, b, c)


@njit(inline="always")
def _flush(x):  # type: ignore[no-untyped-def]
    """Subnormal float32 → zero of its sign."""
    bits = _bits32(x)
    return x if bits & uint32(0x7F800000) else _float32(bits & uint32(0x80000000))


@njit(inline="always")
def _saturate(x):  # type: ignore[no-untyped-def]
    """To [0, 1]; NaN and -0 become +0."""
    return float32(1) if x > float32(1) else (x if x > float32(0) else float32(0))


def flush(a):  # type: ignore[no-untyped-def]
    return _flush(a)


def saturate(a):  # type: ignore[no-untyped-def]
    return _saturate(a)


def saturate_f64(a):  # type: ignore[no-untyped-def]
    return float64(1) if a > float64(1) else (a if a > float64(0) else float64(0))


def add_ftz(a, b):  # type: ignore[no-untyped-def]
    return _flush(_flush(a) + _flush(b))


def sub_ftz(a, b):  # type: ignore[no-untyped-def]
    return _flush(_flush(a) - _flush(b))


def mul_ftz(a, b):  # type: ignore[no-untyped-def]
    return _flush(_flush(a) * _flush(b))


def fma_ftz(a, b, c):  # type: ignore[no-untyped-def]
    return _flush(fused_multiply_add(_flush(a), _flush(b), _flush(c)))


def min_number(a, b):  # type: ignore[no-untyped-def]
    """The number if one is NaN; -0 is below +0."""
    if a != a:
        return b
    if b != b:
        return a
    if a == b:
        return a if a != 0 or _is_negative(a) else b
    return a if a < b else b


def max_number(a, b):  # type: ignore[no-untyped-def]
    if a != a:
        return b
    if b != b:
        return a
    if a == b:
        return b if a != 0 or _is_negative(a) else a
    return a if a > b else b


def min_nan(a, b):  # type: ignore[no-untyped-def]
    if a != a or b != b:
        return a + b
    if a == b:
        return a if a != 0 or _is_negative(a) else b
    return a if a < b else b


def max_nan(a, b):  # type: ignore[no-untyped-def]
    if a != a or b != b:
        return a + b
    if a == b:
        return b if a != 0 or _is_negative(a) else a
    return a if a > b else b


@intrinsic
def _is_negative(typingctx, value):  # type: ignore[no-untyped-def]
    del typingctx

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        del context, signature
        kind = ir.IntType(value.bitwidth)
        return builder.icmp_signed("<", builder.bitcast(args[0], kind), ir.Constant(kind, 0))

    return types.boolean(value), generate


@njit(inline="always")
def _odd_sum(a, b):  # type: ignore[no-untyped-def]
    """a + b in float64 rounded to odd: rounding it further to at most 51 bits equals rounding the exact sum once
    (Boldo & Melquiond 2008)."""
    total = a + b
    if not np.isfinite(total):
        return total
    a_part = total - b
    error = (a - a_part) + (b - (total - a_part))
    bits = _bits64(total)
    if error != 0.0 and not bits & uint64(1):
        # The exact sum lies between total and its neighbour on the error's side; that neighbour is odd.
        bits = bits + uint64(1) if (error > 0.0) == (total > 0.0) else bits - uint64(1)
    return _float64(bits)


@njit(inline="always")
def _odd_float32(x):  # type: ignore[no-untyped-def]
    """float64 → float32 rounded to odd."""
    near = float32(x)
    if float64(near) == x or x != x:
        return near
    bits = _bits32(near)
    if abs(float64(near)) > abs(x):
        bits -= uint32(1)
    return _float32(bits | uint32(1))


@njit(inline="always")
def _directed_float32(x, direction):  # type: ignore[no-untyped-def]
    """float64 → float32 toward zero (0), down (-1) or up (1)."""
    near = float32(x)
    wide = float64(near)
    if wide == x or x != x:
        return near
    bits = _bits32(near)
    grows = direction != 0 and (direction > 0) == (x > 0)
    if grows:
        if abs(wide) < abs(x):
            if bits & uint32(0x7FFFFFFF) == 0:
                bits = uint32(1) | (uint32(0x80000000) if x < 0 else uint32(0))
            else:
                bits += uint32(1)
    elif abs(wide) > abs(x):
        bits -= uint32(1)
    return _float32(bits)


@njit(inline="always")
def _sum_down(a, b):  # type: ignore[no-untyped-def]
    """Rounded down, where a sum that is exactly zero is -0 unless both terms are +0."""
    total = _odd_sum(a, b)
    if total == 0.0:
        return float32(-0.0) if _is_negative(a) or _is_negative(b) else float32(0.0)
    return _directed_float32(total, -1)


def narrow_f32_rz(a):  # type: ignore[no-untyped-def]
    return _directed_float32(a, 0)


def narrow_f32_rm(a):  # type: ignore[no-untyped-def]
    return _directed_float32(a, -1)


def narrow_f32_rp(a):  # type: ignore[no-untyped-def]
    return _directed_float32(a, 1)


def add_rz(a, b):  # type: ignore[no-untyped-def]
    return _directed_float32(_odd_sum(float64(a), float64(b)), 0)


def add_rm(a, b):  # type: ignore[no-untyped-def]
    return _sum_down(float64(a), float64(b))


def add_rp(a, b):  # type: ignore[no-untyped-def]
    return _directed_float32(_odd_sum(float64(a), float64(b)), 1)


def mul_rz(a, b):  # type: ignore[no-untyped-def]
    return _directed_float32(float64(a) * float64(b), 0)


def mul_rm(a, b):  # type: ignore[no-untyped-def]
    return _directed_float32(float64(a) * float64(b), -1)


def mul_rp(a, b):  # type: ignore[no-untyped-def]
    return _directed_float32(float64(a) * float64(b), 1)


def fma_rz(a, b, c):  # type: ignore[no-untyped-def]
    return _directed_float32(_odd_sum(float64(a) * float64(b), float64(c)), 0)


def fma_rm(a, b, c):  # type: ignore[no-untyped-def]
    return _sum_down(float64(a) * float64(b), float64(c))


def fma_rp(a, b, c):  # type: ignore[no-untyped-def]
    return _directed_float32(_odd_sum(float64(a) * float64(b), float64(c)), 1)


@njit(inline="always")
def _odd_quotient(a, b):  # type: ignore[no-untyped-def]
    quotient = a / b
    if not np.isfinite(quotient) or quotient == 0.0 or not np.isfinite(b):
        return quotient
    error = fused_multiply_add(-quotient, b, a)
    bits = _bits64(quotient)
    if error != 0.0 and not bits & uint64(1):
        bits = bits + uint64(1) if (error > 0.0) == (a > 0.0) else bits - uint64(1)
    return _float64(bits)


def div_rz(a, b):  # type: ignore[no-untyped-def]
    return _directed_float32(_odd_quotient(float64(a), float64(b)), 0)


def div_rm(a, b):  # type: ignore[no-untyped-def]
    return _directed_float32(_odd_quotient(float64(a), float64(b)), -1)


def div_rp(a, b):  # type: ignore[no-untyped-def]
    return _directed_float32(_odd_quotient(float64(a), float64(b)), 1)


@njit(inline="always")
def _odd_sqrt(a):  # type: ignore[no-untyped-def]
    root = np.sqrt(a)
    if not np.isfinite(root) or root == 0.0:
        return root
    error = fused_multiply_add(-root, root, a)
    bits = _bits64(root)
    if error != 0.0 and not bits & uint64(1):
        bits = bits + uint64(1) if error > 0.0 else bits - uint64(1)
    return _float64(bits)


def sqrt_rz(a):  # type: ignore[no-untyped-def]
    return _directed_float32(_odd_sqrt(float64(a)), 0)


def sqrt_rm(a):  # type: ignore[no-untyped-def]
    return _directed_float32(_odd_sqrt(float64(a)), -1)


def sqrt_rp(a):  # type: ignore[no-untyped-def]
    return _directed_float32(_odd_sqrt(float64(a)), 1)


# The approximate functions: the correctly rounded result stands in for the hardware's (a few ulp off at most).


def rsqrt(a):  # type: ignore[no-untyped-def]
    if a == 0:
        return float32(-np.inf) if _is_negative(a) else float32(np.inf)
    return float32(1.0 / np.sqrt(float64(a)))


def rsqrt_f64(a):  # type: ignore[no-untyped-def]
    if a == 0:
        return -np.inf if _is_negative(a) else np.inf
    return 1.0 / np.sqrt(a)


def rcp(a):  # type: ignore[no-untyped-def]
    if a == 0:
        return float32(-np.inf) if _is_negative(a) else float32(np.inf)
    return float32(1) / a


def rcp_f64(a):  # type: ignore[no-untyped-def]
    if a == 0:
        return -np.inf if _is_negative(a) else np.inf
    return 1.0 / a


def ex2(a):  # type: ignore[no-untyped-def]
    return float32(np.exp2(float64(a)))


def lg2(a):  # type: ignore[no-untyped-def]
    return float32(np.log2(float64(a)))


def sin(a):  # type: ignore[no-untyped-def]
    return float32(np.sin(float64(a)))


def cos(a):  # type: ignore[no-untyped-def]
    return float32(np.cos(float64(a)))


def tanh(a):  # type: ignore[no-untyped-def]
    return float32(np.tanh(float64(a)))


def copysign_f32(a, b):  # type: ignore[no-untyped-def]
    return (a & uint32(0x7FFFFFFF)) | (b & uint32(0x80000000))


def copysign_f64(a, b):  # type: ignore[no-untyped-def]
    return (a & uint64(0x7FFFFFFFFFFFFFFF)) | (b & uint64(0x8000000000000000))


def testp_subnormal(a):  # type: ignore[no-untyped-def]
    bits = _bits32(a)
    return bits & uint32(0x7F800000) == 0 and bits & uint32(0x7FFFFF) != 0


# ---- 16-bit floats ---------------------------------------------------------------------------------------------------


@njit(inline="always")
def _widen_f16(h):  # type: ignore[no-untyped-def]
    bits = uint32(h)
    sign = (bits & uint32(0x8000)) << uint32(16)
    rest = bits & uint32(0x7FFF)
    # Scaling by 2^112 moves the exponent's bias and makes subnormals normal, exactly.
    scaled = _float32(rest << uint32(13)) * _float32(uint32(0x77800000))
    plain = _bits32(scaled)
    if rest >= uint32(0x7C00):
        plain = uint32(0x7F800000) | ((rest & uint32(0x3FF)) << uint32(13))
    return _float32(sign | plain)


@njit(inline="always")
def _narrow_f16(x):  # type: ignore[no-untyped-def]
    """float32 → f16 bits, to nearest even."""
    bits = _bits32(x)
    sign = (bits >> uint32(16)) & uint32(0x8000)
    bits &= uint32(0x7FFFFFFF)
    if bits >= uint32(0x47800000):
        if bits > uint32(0x7F800000):
            return uint32(0x7FFF)
        return sign | uint32(0x7C00)
    if bits < uint32(0x38800000):
        # Adding 0.5 lines the last kept bit up with float32's own rounding.
        return sign | (_bits32(_float32(bits) + float32(0.5)) - uint32(0x3F000000))
    odd = (bits >> uint32(13)) & uint32(1)
    return sign | (uint32(bits + uint32(0xC8000FFF) + odd) >> uint32(13))


@njit(inline="always")
def _widen_bf16(h):  # type: ignore[no-untyped-def]
    return _float32(uint32(h) << uint32(16))


@njit(inline="always")
def _narrow_bf16(x):  # type: ignore[no-untyped-def]
    bits = _bits32(x)
    if bits & uint32(0x7FFFFFFF) > uint32(0x7F800000):
        return uint32(0x7FFF)
    return (bits + uint32(0x7FFF) + ((bits >> uint32(16)) & uint32(1))) >> uint32(16)


@njit(inline="always")
def _fma_once(a, b, c):  # type: ignore[no-untyped-def]
    """a * b + c of 16-bit floats widened to float32, rounded to odd in float32: narrowing it rounds once."""
    return _odd_float32(_odd_sum(float64(a) * float64(b), float64(c)))


def fma_once(a, b, c):  # type: ignore[no-untyped-def]
    return _fma_once(a, b, c)


def widen_f16(a):  # type: ignore[no-untyped-def]
    return _widen_f16(a)


def widen_low_f16(a):  # type: ignore[no-untyped-def]
    return _widen_f16(a & uint32(0xFFFF))


def widen_high_f16(a):  # type: ignore[no-untyped-def]
    return _widen_f16(a >> uint32(16))


def widen_low_bf16(a):  # type: ignore[no-untyped-def]
    return _float32(a << uint32(16))


def widen_high_bf16(a):  # type: ignore[no-untyped-def]
    return _float32(a & uint32(0xFFFF0000))


def widen_bf16(a):  # type: ignore[no-untyped-def]
    return _widen_bf16(a)


def narrow_f16(a):  # type: ignore[no-untyped-def]
    return uint16(_narrow_f16(a))


def narrow_bf16(a):  # type: ignore[no-untyped-def]
    return uint16(_narrow_bf16(a))


def narrow_f16_f64(a):  # type: ignore[no-untyped-def]
    return uint16(_narrow_f16(_odd_float32(a)))


def narrow_bf16_f64(a):  # type: ignore[no-untyped-def]
    return uint16(_narrow_bf16(_odd_float32(a)))


def narrow_f16_rz(a):  # type: ignore[no-untyped-def]
    near = _narrow_f16(a)
    wide = _widen_f16(near)
    return uint16(near - uint32(1)) if abs(wide) > abs(a) else uint16(near)


def narrow_bf16_rz(a):  # type: ignore[no-untyped-def]
    return uint16(_narrow_bf16(a)) if a != a else uint16(_bits32(a) >> uint32(16))


def pack_f16(high, low):  # type: ignore[no-untyped-def]
    return (_narrow_f16(high) << uint32(16)) | _narrow_f16(low)


def pack_bf16(high, low):  # type: ignore[no-untyped-def]
    return (_narrow_bf16(high) << uint32(16)) | _narrow_bf16(low)


def pack_f16_rz(high, low):  # type: ignore[no-untyped-def]
    return (uint32(_narrow_f16_rz(high)) << uint32(16)) | uint32(_narrow_f16_rz(low))


def pack_bf16_rz(high, low):  # type: ignore[no-untyped-def]
    return (uint32(_narrow_bf16_rz(high)) << uint32(16)) | uint32(_narrow_bf16_rz(low))


_narrow_f16_rz = njit(inline="always")(narrow_f16_rz)
_narrow_bf16_rz = njit(inline="always")(narrow_bf16_rz)


def round_tf32(a):  # type: ignore[no-untyped-def]
    """To 10 bits of fraction, ties away from zero (.rna.tf32)."""
    bits = _bits32(a)
    if bits & uint32(0x7F800000) == uint32(0x7F800000):
        return bits
    return (bits + uint32(0x1000)) & uint32(0xFFFFE000)


# ---- 8-bit floats ----------------------------------------------------------------------------------------------------


@njit(inline="always")
def _narrow_e4m3(x):  # type: ignore[no-untyped-def]
    """float32 → e4m3 (no infinities), to nearest even, too large becomes ±448 (.satfinite)."""
    bits = _bits32(x)
    sign = (bits >> uint32(24)) & uint32(0x80)
    bits &= uint32(0x7FFFFFFF)
    if bits > uint32(0x7F800000):
        return uint32(0x7F)
    if bits >= uint32(0x43E80000):
        return sign | uint32(0x7E)
    if bits < uint32(0x3C800000):
        # Below 2^-6 the unit is 2^-9; 2^14 has that ulp.
        return sign | (_bits32(_float32(bits) + float32(16384.0)) - uint32(0x46800000))
    odd = (bits >> uint32(20)) & uint32(1)
    return sign | (uint32(bits + uint32(0xC407FFFF) + odd) >> uint32(20))


@njit(inline="always")
def _widen_e4m3(h):  # type: ignore[no-untyped-def]
    sign = -float32(1) if h & uint32(0x80) else float32(1)
    exponent = int32((h >> uint32(3)) & uint32(15))
    fraction = float32(h & uint32(7))
    if h & uint32(0x7F) == uint32(0x7F):
        return float32(np.nan)
    if exponent == 0:
        return sign * fraction * float32(2.0**-9)
    return sign * (float32(8) + fraction) * _float32(uint32(exponent + 117) << uint32(23))


@njit(inline="always")
def _narrow_e5m2(x):  # type: ignore[no-untyped-def]
    bits = _bits32(x)
    sign = (bits >> uint32(24)) & uint32(0x80)
    bits &= uint32(0x7FFFFFFF)
    if bits > uint32(0x7F800000):
        return uint32(0x7F)
    if bits >= uint32(0x47700000):
        return sign | uint32(0x7B)
    if bits < uint32(0x38800000):
        # Below 2^-14 the unit is 2^-16; 2^7 has that ulp.
        return sign | (_bits32(_float32(bits) + float32(128.0)) - uint32(0x43000000))
    odd = (bits >> uint32(21)) & uint32(1)
    return sign | (uint32(bits + uint32(0xC80FFFFF) + odd) >> uint32(21))


def pack_e4m3(high, low):  # type: ignore[no-untyped-def]
    return uint16((_narrow_e4m3(high) << uint32(8)) | _narrow_e4m3(low))


def pack_e5m2(high, low):  # type: ignore[no-untyped-def]
    return uint16((_narrow_e5m2(high) << uint32(8)) | _narrow_e5m2(low))


def pack_e4m3_f16x2(a):  # type: ignore[no-untyped-def]
    high, low = _widen_f16(a >> uint32(16)), _widen_f16(a & uint32(0xFFFF))
    return uint16((_narrow_e4m3(high) << uint32(8)) | _narrow_e4m3(low))


def pack_e5m2_f16x2(a):  # type: ignore[no-untyped-def]
    high, low = _widen_f16(a >> uint32(16)), _widen_f16(a & uint32(0xFFFF))
    return uint16((_narrow_e5m2(high) << uint32(8)) | _narrow_e5m2(low))


def unpack_e4m3(a):  # type: ignore[no-untyped-def]
    high, low = _widen_e4m3(uint32(a) >> uint32(8)), _widen_e4m3(uint32(a) & uint32(0xFF))
    return (_narrow_f16(high) << uint32(16)) | _narrow_f16(low)


def unpack_e5m2(a):  # type: ignore[no-untyped-def]
    """e5m2 is the upper byte of an f16; NaN becomes the canonical one."""
    high, low = (uint32(a) >> uint32(8)) << uint32(8), (uint32(a) & uint32(0xFF)) << uint32(8)
    if high & uint32(0x7FFF) > uint32(0x7C00):
        high = uint32(0x7FFF)
    if low & uint32(0x7FFF) > uint32(0x7C00):
        low = uint32(0x7FFF)
    return (high << uint32(16)) | low


# ---- float → integer -------------------------------------------------------------------------------------------------


@njit(inline="always")
def _rounded(x, mode):  # type: ignore[no-untyped-def]
    if mode == 0:
        return np.rint(x)
    if mode == 1:
        return np.trunc(x)
    return np.floor(x) if mode == 2 else np.ceil(x)


def to_integer(x, mode, low, high, nan):  # type: ignore[no-untyped-def]
    """float64 → the bits of an integer in [low, high] (both exact float64), saturating.

    ``mode``: 0 nearest even, 1 toward zero, 2 down, 3 up. ``high`` is one above the largest.
    """
    if x != x:
        return nan
    rounded = _rounded(x, mode)
    if rounded < low:
        return uint64(int64(low))
    if rounded >= high:
        return uint64(int64(high * 0.5)) * uint64(2) - uint64(1) if high < 1.8e19 else ~uint64(0)
    return uint64(rounded) if rounded >= 0 else uint64(int64(rounded))


@njit(inline="always")
def add_packed_f16(a, b):  # type: ignore[no-untyped-def]
    high = _narrow_f16(_widen_f16(a >> uint32(16)) + _widen_f16(b >> uint32(16)))
    low = _narrow_f16(_widen_f16(a & uint32(0xFFFF)) + _widen_f16(b & uint32(0xFFFF)))
    return (high << uint32(16)) | low


@njit(inline="always")
def add_packed_bf16(a, b):  # type: ignore[no-untyped-def]
    high = _narrow_bf16(_widen_bf16(a >> uint32(16)) + _widen_bf16(b >> uint32(16)))
    low = _narrow_bf16(_widen_bf16(a & uint32(0xFFFF)) + _widen_bf16(b & uint32(0xFFFF)))
    return (high << uint32(16)) | low
