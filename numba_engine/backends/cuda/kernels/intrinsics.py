"""What PTX can do and Python cannot say: 128-bit accesses, bit casts, single instructions.

Each is one or two instructions in place: an LLVM operation where LLVM has one, inline PTX where not (PTX ISA, sections
"Data Movement" and "Floating-Point Instructions"). Indices are uint32 and count elements of the array. A *quad* is four
consecutive 32-bit elements, 16 bytes; its index must be a multiple of 4. Inline loads are volatile, which keeps them in
the order written: a kernel that names eight loads before their first use has eight in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.cuda.extending import intrinsic
from numba.cuda.types import UniTuple, boolean, float32, int32, int64, uint16, uint32, uint64, void

_I16, _I32, _I64, _F16, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.HalfType(), ir.FloatType()
_RESULT = {_F32: "=f", _I32: "=r"}
_OPERAND = {_F32: "f", _I32: "r", _I64: "l"}


def _asm(
    builder: Any, text: str, result: Any, count: int, args: list[Any], arg_types: list[Any], *, volatile: bool
) -> Any:
    """One inline PTX instruction; ``count`` results of one type (0: none)."""
    constraints = [_RESULT[result] for _ in range(count)] + [_OPERAND[type] for type in arg_types]
    returned = ir.VoidType() if count == 0 else result if count == 1 else ir.LiteralStructType([result] * count)
    asm = ir.InlineAsm(ir.FunctionType(returned, arg_types), text, ",".join(constraints), side_effect=volatile)
    return builder.call(asm, args)


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    """Pointer to an element of a flat array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [builder.zext(index, _I64)])


@intrinsic
def load_weights(typing_context: Any, array: Any, index: Any) -> Any:
    """load_weights(array, index) -> 4 × uint32 that nobody writes and nobody reads again: not kept in L1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.ptrtoint(_element(context, builder, signature.args[0], args[0], args[1]), _I64)
        text = "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {$0, $1, $2, $3}, [$4];"
        quad = _asm(builder, text, _I32, 4, [address], [_I64], volatile=True)
        parts = [builder.extract_value(quad, i) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, parts)

    return UniTuple(uint32, 4)(array, uint32), generate


@intrinsic
def address_of(typing_context: Any, array: Any, index: Any) -> Any:
    """address_of(array, index) -> uint64, in bytes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(_element(context, builder, signature.args[0], args[0], args[1]), _I64)

    return uint64(array, uint32), generate


@intrinsic
def prefetch(typing_context: Any, array: Any, index: Any) -> Any:
    """prefetch(array, index): have L2 fetch the 128-byte line that holds array[index]. Nothing waits for it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.ptrtoint(_element(context, builder, signature.args[0], args[0], args[1]), _I64)
        _asm(builder, "prefetch.global.L2 [$0];", None, 0, [address], [_I64], volatile=True)
        return context.get_dummy_value()

    return void(array, uint32), generate


def _load_at(count: int) -> Any:
    @intrinsic
    def load_at(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            results = ", ".join(f"${i}" for i in range(count))
            vector, results = (f".v{count}", f"{{{results}}}") if count > 1 else ("", results)
            text = f"ld.global.nc.L1::no_allocate.L2::256B{vector}.u32 {results}, [${count}];"
            words = _asm(builder, text, _I32, count, args, [_I64], volatile=True)
            parts = [builder.extract_value(words, i) for i in range(count)] if count > 1 else [words]
            return context.make_tuple(builder, signature.return_type, parts)

        return UniTuple(uint32, count)(uint64), generate

    return load_at


load_weights_at = _load_at(4)
"""load_weights_at(address): as ``load_weights``, of a byte address. A constant that is added last costs nothing."""

load_weight_pair_at = _load_at(2)
"""As ``load_weights_at``, 2 × uint32."""

load_weight_at = _load_at(1)
"""As ``load_weights_at``, one uint32, in a tuple."""


@intrinsic
def load_quad(typing_context: Any, array: Any, index: Any) -> Any:
    """load_quad(array, index) -> array[index : index + 4] as a tuple, in one 128-bit load. Shared or global memory."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], args[0], args[1])
        quad = builder.load(builder.bitcast(pointer, _quad_of(pointer).as_pointer()), align=16)
        parts = [builder.extract_element(quad, _I32(i)) for i in range(4)]
        return context.make_tuple(builder, signature.return_type, parts)

    return UniTuple(array.dtype, 4)(array, uint32), generate


@intrinsic
def store_quad(typing_context: Any, array: Any, index: Any, quad: Any) -> Any:
    """array[index : index + 4] = quad, in one 128-bit store. Shared or global memory."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], args[0], args[1])
        vector = ir.Constant(_quad_of(pointer), ir.Undefined)
        for i, value in enumerate(cgutils.unpack_tuple(builder, args[2], 4)):
            vector = builder.insert_element(vector, value, _I32(i))
        builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=16)
        return context.get_dummy_value()

    return void(array, uint32, UniTuple(array.dtype, 4)), generate


def _quad_of(pointer: Any) -> Any:
    return ir.VectorType(pointer.type.pointee, 4)


@intrinsic
def store_pair(typing_context: Any, array: Any, index: Any, pair: Any) -> Any:
    """array[index : index + 2] = pair, in one 64-bit store; index is even. Shared or global memory."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], args[0], args[1])
        vector = ir.Constant(ir.VectorType(pointer.type.pointee, 2), ir.Undefined)
        for i, value in enumerate(cgutils.unpack_tuple(builder, args[2], 2)):
            vector = builder.insert_element(vector, value, _I32(i))
        builder.store(vector, builder.bitcast(pointer, vector.type.as_pointer()), align=8)
        return context.get_dummy_value()

    return void(array, uint32, UniTuple(array.dtype, 2)), generate


def _multiply_accumulate(shape_and_types: str, element: Any, a_words: int = 4) -> Any:
    """mma.sync with the fragments of a lane as tuples: (a [a_words], b [a_words / 2], c [4]) -> [4]."""
    type, b_words = _F32 if element is float32 else _I32, a_words // 2

    @intrinsic
    def multiply_accumulate(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            sizes = (a_words, b_words, 4)
            numbers = iter(range(4 + sum(sizes)))
            d, a, b, c = ("{" + ",".join(f"${next(numbers)}" for _ in range(size)) + "}" for size in (4, *sizes))
            text = f"mma.sync.aligned.{shape_and_types} {d}, {a}, {b}, {c};"
            values = [v for arg, n in zip(args, sizes, strict=True) for v in cgutils.unpack_tuple(builder, arg, n)]
            sums = _asm(builder, text, type, 4, values, [value.type for value in values], volatile=False)
            return context.make_tuple(
                builder, signature.return_type, [builder.extract_value(sums, i) for i in range(4)]
            )

        fragments = UniTuple(uint32, a_words), UniTuple(uint32, b_words), UniTuple(element, 4)
        return fragments[2](*fragments), generate

    return multiply_accumulate


mma_bf16 = _multiply_accumulate("m16n8k16.row.col.f32.bf16.bf16.f32", float32)
"""mma_bf16(a, b, c): c + a b of a lane's fragments, a 16×16 and b 16×8 bfloat16, c float32. All lanes of the warp."""

mma_f16 = _multiply_accumulate("m16n8k16.row.col.f32.f16.f16.f32", float32)
"""As ``mma_bf16``, of halves."""

mma_s8 = _multiply_accumulate("m16n8k32.row.col.s32.s8.s8.s32", int32)
"""mma_s8(a, b, c): c + a b, a 16×32 and b 32×8 signed bytes, c int32; exact."""

mma_s8_16 = _multiply_accumulate("m16n8k16.row.col.s32.s8.s8.s32", int32, a_words=2)
"""As ``mma_s8``, a 16×16 and b 16×8."""


def _operation(returned: Any, arguments: list[Any], build: Callable[..., Any]) -> Any:
    """An intrinsic of fixed types whose LLVM value is ``build(builder, *args)``."""

    typed = returned(*arguments), lambda context, builder, signature, args: build(builder, *args)
    arities: dict[int, Callable[..., Any]] = {
        1: lambda typing_context, a: typed,
        2: lambda typing_context, a, b: typed,
        3: lambda typing_context, a, b, c: typed,
    }
    return intrinsic(arities[len(arguments)])


def _llvm_call(name: str, type: Any) -> Callable[..., Any]:
    """An LLVM intrinsic of one type throughout."""

    def build(builder: Any, *args: Any) -> Any:
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(type, [type] * len(args)), name)
        return builder.call(function, args)

    return build


def _inline(text: str, type: Any) -> Callable[..., Any]:
    return lambda builder, *args: _asm(builder, text, type, 1, list(args), [arg.type for arg in args], volatile=False)


def _half_at(builder: Any, word: Any, i: Any) -> Any:
    """Half i of a word: shifted down and cut off."""
    shift = builder.shl(builder.trunc(i, _I32), _I32(4))
    return builder.fpext(builder.bitcast(builder.trunc(builder.lshr(word, shift), _I16), _F16), _F32)


def _bf16_at(builder: Any, word: Any, i: Any) -> Any:
    """bfloat16 i of a word is the upper half of the float."""
    up = builder.sub(_I32(16), builder.shl(builder.trunc(i, _I32), _I32(4)))
    return builder.bitcast(builder.and_(builder.shl(word, up), _I32(0xFFFF0000)), _F32)


def _byte_at(builder: Any, word: Any, i: Any) -> Any:
    """Byte i, permuted under the exponent of 2^23, less 2^23 and the 128 it is stored with. Exact."""
    selector = builder.add(_I32(0x7440), builder.trunc(i, _I32))
    permute = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, [_I32] * 3), "llvm.nvvm.prmt")
    biased = builder.call(permute, [word, _I32(0x4B000000), selector])
    return builder.fsub(builder.bitcast(biased, _F32), _F32(2.0**23 + 128))


def _nibble_at(builder: Any, word: Any, i: Any) -> Any:
    """Nibble i, rotated to bits 19 … 22, the top of the mantissa of 16.0. Exact."""
    left = builder.and_(builder.sub(_I32(19), builder.shl(builder.trunc(i, _I32), _I32(2))), _I32(31))
    rotate = cgutils.get_or_insert_function(builder.module, ir.FunctionType(_I32, [_I32] * 3), "llvm.fshl.i32")
    moved = builder.call(rotate, [word, word, left])
    return builder.bitcast(builder.or_(builder.and_(moved, _I32(0x00780000)), _I32(0x41800000)), _F32)


def _float_to_half(builder: Any, value: Any) -> Any:
    return builder.bitcast(builder.fptrunc(value, _F16), _I16)


as_float = _operation(float32, [uint32], lambda builder, bits: builder.bitcast(bits, _F32))
"""as_float(uint32) -> float32 of the same bits."""

as_bits = _operation(uint32, [float32], lambda builder, value: builder.bitcast(value, _I32))
"""as_bits(float32) -> uint32 of the same bits."""

half_to_float = _operation(float32, [uint32], lambda builder, bits: _half_at(builder, bits, _I64(0)))
"""half_to_float(uint32) -> float32: the low 16 bits as IEEE half; exact."""

float_of = _operation(float32, [uint32, int64], lambda builder, word, i: builder.bitcast(word, _F32))
"""float_of(word, 0): a word that is one float32."""

float_of_half = _operation(float32, [uint32, int64], _half_at)
"""float_of_half(word, i): half i (0, 1) of a word."""

float_of_bf16 = _operation(float32, [uint32, int64], _bf16_at)
"""float_of_bf16(word, i): bfloat16 i (0, 1) of a word."""

float_of_byte = _operation(float32, [uint32, int64], _byte_at)
"""float_of_byte(word, i): byte i (0 … 3) of a word, less 128."""

float_of_nibble = _operation(float32, [uint32, int64], _nibble_at)
"""float_of_nibble(word, i): 16 plus nibble i (0 … 7) of a word."""

float_to_half = _operation(uint16, [float32], _float_to_half)
"""float_to_half(float32) -> uint16: rounded to nearest even."""

bf16_pair = _operation(uint32, [float32] * 2, _inline("cvt.rn.bf16x2.f32 $0, $2, $1;", _I32))
"""bf16_pair(low, high): both rounded to bfloat16, in the halves of a word."""

half_pair = _operation(uint32, [float32] * 2, _inline("cvt.rn.f16x2.f32 $0, $2, $1;", _I32))
"""half_pair(low, high): both rounded to half, in the halves of a word."""

round_to_int = _operation(int32, [float32], _inline("cvt.rni.s32.f32 $0, $1;", _I32))
"""round_to_int(x): to nearest, ties to even; 0 of a NaN."""

permute = _operation(uint32, [uint32] * 3, _inline("prmt.b32 $0, $1, $2, $3;", _I32))
"""permute(a, b, selector): byte i is byte (selector >> 4 i) & 7 of the eight of a and b."""

fma = _operation(float32, [float32] * 3, _llvm_call("llvm.fma.f32", _F32))
"""fma(a, b, c) -> a * b + c, rounded once."""

select = _operation(
    float32, [boolean, float32, float32], lambda builder, condition, a, b: builder.select(condition, a, b)
)
"""select(condition, a, b): a if the condition holds, else b; no branch."""

sqrt = _operation(float32, [float32], _llvm_call("llvm.sqrt.f32", _F32))
"""sqrt(x), correctly rounded."""

multiply = _operation(float32, [float32] * 2, _inline("mul.rn.f32 $0, $1, $2;", _F32))
"""multiply(a, b), rounded, and never fused with a sum that follows."""

divide = _operation(float32, [float32] * 2, _inline("div.rn.f32 $0, $1, $2;", _F32))
"""divide(a, b), correctly rounded."""

exp2 = _operation(float32, [float32], _inline("ex2.approx.ftz.f32 $0, $1;", _F32))
"""exp2(x) within 2 units in the last place; one instruction of the special function unit."""

reciprocal = _operation(float32, [float32], _inline("rcp.approx.ftz.f32 $0, $1;", _F32))
"""reciprocal(x) within 1 unit in the last place; 0 and smaller than normal numbers give infinity."""

to_fixed = _operation(uint64, [float32], lambda builder, value: builder.fptoui(value, _I64))
"""to_fixed(float32) -> uint64, towards zero."""

log2 = _operation(float32, [float32], _inline("lg2.approx.f32 $0, $1;", _F32))
"""log2(x): absolute error 2^-22 between ½ and 2, relative 2^-22 elsewhere."""
