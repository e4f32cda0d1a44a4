"""Tensor cores and what feeds them: mma.sync, ldmatrix, cp.async, shared memory by address.

PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions" and "Data Movement: Asynchronous copy". Addresses of
shared memory are 32-bit and in bytes; asynchronous copies and loads by address are volatile, so that they keep their
order among each other and around barriers.

With g = lane / 4 and t = lane % 4, ``mma.m16n8k16`` takes of A [16, 16] the pairs (row g, columns 2t, 2t + 1),
(g + 8, same), (g, 2t + 8, 2t + 9), (g + 8, same); of B [16, 8] the pairs (rows 2t, 2t + 1, column g) and (2t + 8,
2t + 9, g); and has of C [16, 8] the four (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.cuda.extending import intrinsic
from numba.cuda.types import UniTuple, float32, int64, uint32, void

from numba_engine.backends.cuda.kernels.intrinsics import _F32, _I32, _I64, _asm, _element, _operation


def multiply_adds_f16(products: Sequence[tuple[int, int, int]]) -> Any:
    """A function (sums, at, a, a_at, b, b_at) of many products, in the order given, each three offsets (s, i, j):

        sums[at + s : at + s + 4] += A B, A's four registers a[a_at + i :] and B's two b[b_at + j :], of halves each.

    One statement in the kernel, and unrolled whatever LLVM thinks of it. The arrays are ``cuda.local.array``s and the
    indices constants once loops are unrolled, so all of it is registers.
    """
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
        " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )

    @intrinsic
    def multiply_adds(typing_context: Any, sums: Any, at: Any, a: Any, a_at: Any, b: Any, b_at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = [context.make_array(signature.args[n])(context, builder, args[n]).data for n in (0, 2, 4)]

            def places(array: int, offset: int, count: int) -> list[Any]:
                first = builder.add(args[2 * array + 1], _I64(offset))
                return [builder.gep(data[array], [builder.add(first, _I64(i))]) for i in range(count)]

            for sum_offset, a_offset, b_offset in products:
                results = places(0, sum_offset, 4)
                operands = [builder.load(x) for x in [*places(1, a_offset, 4), *places(2, b_offset, 2), *results]]
                result = _asm(builder, text, _F32, 4, operands, [_I32] * 6 + [_F32] * 4, volatile=False)
                for i, place in enumerate(results):
                    builder.store(builder.extract_value(result, i), place)
            return context.get_dummy_value()

        return void(sums, int64, a, int64, b, int64), generate

    return multiply_adds


@intrinsic
def shared_address(typing_context: Any, array: Any) -> Any:
    """Where a shared array begins."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        text = "{ .reg .u64 a; cvta.to.shared.u64 a, $1; cvt.u32.u64 $0, a; }"
        return _asm(builder, text, _I32, 1, [builder.ptrtoint(data, _I64)], [_I64], volatile=False)

    return uint32(array), generate


@intrinsic
def copy_async(typing_context: Any, target: Any, array: Any, index: Any, num_bytes: Any) -> Any:
    """copy_async(shared address, array, index, n): n (0 … 16) bytes from array[index:], zeros up to 16; past L1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.ptrtoint(_element(context, builder, signature.args[1], args[1], args[2]), _I64)
        text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
        _asm(builder, text, _I32, 0, [args[0], address, args[3]], [_I32, _I64, _I32], volatile=True)
        return context.get_dummy_value()

    return void(uint32, array, uint32, uint32), generate


@intrinsic
def load_pair(typing_context: Any, array: Any, index: Any) -> Any:
    """load_pair(array, index) -> array[index], array[index + 1], in one 64-bit load. The index must be even."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], args[0], args[1])
        vector = ir.VectorType(pointer.type.pointee, 2)
        pair = builder.load(builder.bitcast(pointer, vector.as_pointer()), align=8)
        parts = [builder.extract_element(pair, _I32(i)) for i in range(2)]
        return context.make_tuple(builder, signature.return_type, parts)

    return UniTuple(array.dtype, 2)(array, uint32), generate


def _quad_from_shared(text: str) -> Any:
    @intrinsic
    def load(typing_context: Any, words: Any, at: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            quad = _asm(builder, text, _I32, 4, [args[2]], [_I32], volatile=True)
            _keep(context, builder, signature.args[0], args[0], args[1], quad)
            return context.get_dummy_value()

        return void(words, int64, uint32), generate

    return load


@intrinsic
def load_quad_once(typing_context: Any, words: Any, at: Any, array: Any, index: Any) -> Any:
    """words[at : at + 4] = array[index : index + 4] that nobody reads again: not kept in L1."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = builder.ptrtoint(_element(context, builder, signature.args[2], args[2], args[3]), _I64)
        text = "ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];"
        quad = _asm(builder, text, _I32, 4, [address], [_I64], volatile=True)
        _keep(context, builder, signature.args[0], args[0], args[1], quad)
        return context.get_dummy_value()

    return void(words, int64, array, uint32), generate


def _keep(context: Any, builder: Any, array_type: Any, array: Any, at: Any, quad: Any) -> None:
    data = context.make_array(array_type)(context, builder, array).data
    for i in range(4):
        builder.store(builder.extract_value(quad, i), builder.gep(data, [builder.add(at, _I64(i))]))


load_shared_quad = _quad_from_shared("ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];")
"""load_shared_quad(words, at, address): words[at : at + 4] = 16 bytes of shared memory."""

load_matrices_transposed = _quad_from_shared("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];")
"""load_matrices_transposed(words, at, address): words[at + m] of four 8 × 8 matrices of halves, rows of 16 bytes.

Lane 8m + i gives the address of row i of matrix m. The lane gets the pair (rows 2t, 2t + 1, column g): B's, if rows
are k.
"""


truncate_to_half = _operation(
    float32,
    [float32],
    lambda builder, x: builder.bitcast(builder.and_(builder.bitcast(x, _I32), _I32(0xFFFFE000)), _F32),
)
"""x without the bits that a half of its size has not; x less that is exact."""


def _statement(text: str) -> Any:
    @intrinsic
    def statement(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            builder.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), text, "~{memory}", side_effect=True), [])
            return context.get_dummy_value()

        return void(), generate

    return statement


commit_copies = _statement("cp.async.commit_group;")
"""The copies since the last commit are a group."""

wait_for_copies = _statement("cp.async.wait_all;")
"""Wait for this thread's copies. What others copied is there after a barrier."""

wait_for_all_but_one = _statement("cp.async.wait_group 1;")
"""Wait for all of this thread's groups but the latest."""
