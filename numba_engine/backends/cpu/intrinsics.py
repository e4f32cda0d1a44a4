"""What numba has no words for: vector code, raw memory and atomics, emitted as LLVM IR.

Vectors are 16 lanes wide whatever the machine: LLVM splits them into two 256-bit or four 128-bit registers where it
must, which changes no result. Only ``dot4`` and ``dot2`` have forms of their own for instruction sets, all with the
same results.
Every reduction has a fixed order of lanes, and no fast-math flag is ever set, so a result depends on nothing but its
inputs.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable
from typing import Any, Literal, get_args

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16

InstructionSet = Literal["avx512bf16", "avx512vnni", "avxvnni", "avx2", "generic"]


@functools.cache
def host_instruction_set() -> InstructionSet:
    """The best of the instruction sets this machine has."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "generic"
    features = llvm.get_host_cpu_features()
    if all(features.get(f) for f in ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")):
        return "avx512bf16" if features.get("avx512bf16") else "avx512vnni"
    if features.get("avx2") and (features.get("avxvnni") or features.get("avx512vnni")):
        return "avxvnni"
    return "avx2" if features.get("avx2") else "generic"


class _BFloat16(ir.Type):  # which llvmlite has no name for
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


i1, i8, i16, i32, i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
f16, f32, f64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
vi8x64 = ir.VectorType(i8, 64)
vi16 = ir.VectorType(i16, LANES)
vi32 = ir.VectorType(i32, LANES)
vf16 = ir.VectorType(f16, LANES)
vf32 = ir.VectorType(f32, LANES)
vbf16x2 = ir.VectorType(_BFloat16(), 2 * LANES)


class Emitter:
    """An LLVM IR builder that speaks of addresses (i64) and 16-lane vectors."""

    def __init__(self, builder: ir.IRBuilder, isa: InstructionSet = "generic") -> None:
        assert isa in get_args(InstructionSet)
        self.b = builder
        self.isa = isa

    # ---- integers and addresses ----

    def integer(self, value: int, type_: ir.Type = i64) -> ir.Constant:
        return ir.Constant(type_, value)

    def at(self, address: ir.Value, offset: ir.Value | int, scale: int = 1) -> ir.Value:
        """address + offset * scale."""
        if isinstance(offset, int):
            return self.b.add(address, self.integer(offset * scale)) if offset else address
        scaled = offset if scale == 1 else self.b.mul(offset, self.integer(scale))
        return self.b.add(address, scaled)

    def load(self, address: ir.Value, type_: ir.Type, align: int) -> ir.Value:
        return self.b.load(self.b.inttoptr(address, type_.as_pointer()), align=align)

    def store(self, value: ir.Value, address: ir.Value, align: int) -> None:
        self.b.store(value, self.b.inttoptr(address, value.type.as_pointer()), align=align)

    def prefetch(self, address: ir.Value, nbytes: int, *, level: Literal[1, 2] = 1) -> None:
        """Ask for the cache lines of ``nbytes`` bytes, into L1 or L2; any address is allowed."""
        for offset in range(0, nbytes, 64):
            pointer = self.b.inttoptr(self.at(address, offset), i8.as_pointer())
            read, locality, data = self.integer(0, i32), self.integer(4 - level, i32), self.integer(1, i32)
            self.call("llvm.prefetch.p0", ir.VoidType(), pointer, read, locality, data)

    def call(self, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
        signature = ir.FunctionType(result, [a.type for a in args])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, signature, name), list(args))

    def loop(self, count: ir.Value) -> Any:
        """``with e.loop(n) as i``: i64 counter."""
        return _Loop(self.b, count)

    # ---- vectors ----

    def splat(self, value: ir.Value, lanes: int = LANES) -> ir.Value:
        vector = ir.VectorType(value.type, lanes)
        one = self.b.insert_element(ir.Constant(vector, ir.Undefined), value, self.integer(0, i32))
        return self.b.shuffle_vector(
            one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(i32, lanes), [0] * lanes)
        )

    def const(self, like: ir.Type, value: float) -> ir.Constant:
        """A constant of a scalar type, or the same constant in every lane of a vector type."""
        if isinstance(like, ir.VectorType):
            return ir.Constant(like, [self.const(like.element, value)] * like.count)
        if isinstance(like, ir.IntType):
            return ir.Constant(like, int(value))
        return ir.Constant(like, float(value))

    def shuffle(self, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
        return self.b.shuffle_vector(a, b, ir.Constant(ir.VectorType(i32, len(lanes)), lanes))

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.call(f"llvm.fma.{_suffix(a.type)}", a.type, a, b, c)

    def unary(self, name: str, a: ir.Value) -> ir.Value:
        return self.call(f"llvm.{name}.{_suffix(a.type)}", a.type, a)

    def binary(self, name: str, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.call(f"llvm.{name}.{_suffix(a.type)}", a.type, a, b)

    def maximum(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The larger; b if either is NaN. One instruction on x86, where LLVM's own maxnum takes three."""
        return self.b.select(self.b.fcmp_ordered(">", a, b), a, b)

    def masked_load(self, address: ir.Value, type_: ir.VectorType, mask: ir.Value, align: int) -> ir.Value:
        pointer = self.b.inttoptr(address, type_.as_pointer())
        zero = ir.Constant(type_, None)
        return self.call(f"llvm.masked.load.{_suffix(type_)}.p0", type_, pointer, self.integer(align, i32), mask, zero)

    def masked_store(self, value: ir.Value, address: ir.Value, mask: ir.Value, align: int) -> None:
        pointer = self.b.inttoptr(address, value.type.as_pointer())
        self.call(
            f"llvm.masked.store.{_suffix(value.type)}.p0", ir.VoidType(), value, pointer, self.integer(align, i32), mask
        )

    def first_lanes(self, count: ir.Value) -> ir.Value:
        """Mask of the first ``count`` (i64) lanes."""
        wanted = self.splat(self.b.trunc(count, i32))
        return self.b.icmp_signed("<", ir.Constant(vi32, list(range(LANES))), wanted)

    def reduce(self, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """All lanes into one, halves onto halves: ((0+8)+(4+12)) + …, always in this order."""
        count = vector.type.count
        while count > 1:
            half = count // 2
            low = self.shuffle(vector, vector, list(range(half)))
            high = self.shuffle(vector, vector, list(range(half, count)))
            vector = combine(low, high)
            count = half
        return self.b.extract_element(vector, self.integer(0, i32))

    def reduce_pair(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """The sums of the lanes of two vectors of integers, as a vector of two."""
        while True:
            n = a.type.count
            left, right = ([j for i in range(2) for j in range(n * i + h, n * i + h + n // 2)] for h in (0, n // 2))
            both = self.b.add(self.shuffle(a, b, left), self.shuffle(a, b, right))
            if n == 2:
                return both
            a, b = (self.shuffle(both, both, list(range(n // 2 * i, n // 2 * (i + 1)))) for i in range(2))

    def fold(self, a: ir.Value, b: ir.Value, n: int) -> ir.Value:
        """a, b: runs of n partial sums, a run a row. Result: runs of n / 2, the halves of each run added up."""
        low, high = _fold_lanes(n)
        return self.b.fadd(self.shuffle(a, b, low), self.shuffle(a, b, high))

    def exp(self, x: ir.Value) -> ir.Value:
        """e^x for float32 scalars or vectors, within 2 ulp; 0 below -87.3, NaN for NaN, for x ≤ 88 (Cephes' expf)."""
        t = x.type
        ti = ir.VectorType(i32, t.count) if isinstance(t, ir.VectorType) else i32
        c = functools.partial(self.const, t)
        clamped = self.b.select(self.b.fcmp_ordered("<", x, c(-104.0)), c(-104.0), x)
        clamped = self.b.select(self.b.fcmp_ordered(">", clamped, c(88.7)), c(88.7), clamped)
        magic = c(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the low bits
        shifted = self.fma(clamped, c(1.44269504088896341), magic)
        n = self.b.fsub(shifted, magic)
        r = self.fma(n, c(-0.693359375), clamped)
        r = self.fma(n, c(2.12194440e-4), r)
        p = c(1.9875691500e-4)
        for k in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = self.fma(p, r, c(k))
        y = self.b.fadd(self.fma(self.b.fmul(p, r), r, r), c(1.0))
        bits = self.b.sub(self.b.bitcast(shifted, ti), self.const(ti, 0x4B400000))
        power = self.b.bitcast(self.b.shl(self.b.add(bits, self.const(ti, 127)), self.const(ti, 23)), t)
        y = self.b.fmul(y, power)
        return self.b.select(self.b.fcmp_ordered("<", x, c(-87.3)), c(0.0), y)

    def soft_capped(self, x: ir.Value, softcap: ir.Value) -> ir.Value:
        """softcap · tanh(x / softcap) of float32 vectors, to a few 1e-7 of softcap: tanh(y) = 1 - 2 / (1 + e^2y)."""
        two = self.const(x.type, 2.0)
        power = self.exp(self.b.fdiv(self.b.fmul(two, x), softcap))
        below_one = self.b.fdiv(two, self.b.fadd(self.const(x.type, 1.0), power))
        return self.b.fmul(softcap, self.b.fsub(self.const(x.type, 1.0), below_one))

    def dot4(self, acc: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
        """acc [16 i32] + in each lane the dot of its 4 unsigned bytes of weights with its 4 signed bytes of x [64 i8].

        No form saturates for |x| ≤ 127: VNNI sums in 32 bits, the others multiply 16-bit values.
        """
        b = self.b
        if self.isa in ("avx512vnni", "avx512bf16"):
            return self.call("llvm.x86.avx512.vpdpbusd.512", vi32, acc, b.bitcast(weights, vi32), b.bitcast(x, vi32))
        half = ir.VectorType(i32, 8)
        if self.isa == "avxvnni":
            return self._by_halves(
                lambda a, w, y: self.call("llvm.x86.avx512.vpdpbusd.256", half, a, w, y),
                acc,
                b.bitcast(weights, vi32),
                b.bitcast(x, vi32),
            )
        if self.isa == "avx2":
            words = ir.VectorType(i16, 32)
            w16, x16 = b.bitcast(weights, words), b.bitcast(x, words)
            eight = self.const(words, 8)
            pairs = (
                (b.and_(w16, self.const(words, 0x00FF)), b.ashr(b.shl(x16, eight), eight)),
                (b.lshr(w16, eight), b.ashr(x16, eight)),
            )
            for w, y in pairs:
                products = self._by_halves(
                    lambda p, q: self.call(
                        "llvm.x86.avx2.pmadd.wd",
                        half,
                        b.bitcast(p, ir.VectorType(i16, 16)),
                        b.bitcast(q, ir.VectorType(i16, 16)),
                    ),
                    b.bitcast(w, vi32),
                    b.bitcast(y, vi32),
                )
                acc = b.add(acc, products)
            return acc
        w32, x32 = b.bitcast(weights, vi32), b.bitcast(x, vi32)
        for byte in range(4):
            w = b.and_(b.lshr(w32, self.const(vi32, 8 * byte)), self.const(vi32, 255))
            y = b.ashr(b.shl(x32, self.const(vi32, 24 - 8 * byte)), self.const(vi32, 24))
            acc = b.add(acc, b.mul(w, y))
        return acc

    def lookup(self, table: tuple[int, ...], indices: ir.Value) -> ir.Value:
        """table[i] for each of 64 bytes i; a table of up to 16 bytes."""
        b = self.b
        row = [*table, *[0] * (16 - len(table))]
        if self.isa in ("avx512vnni", "avx512bf16"):
            return self.call("llvm.x86.avx512.pshuf.b.512", vi8x64, ir.Constant(vi8x64, row * 4), indices)
        if self.isa in ("avx2", "avxvnni"):
            half = ir.VectorType(i8, 32)
            rows = ir.Constant(half, row * 2)
            looked_up = self._by_halves(
                lambda i: b.bitcast(
                    self.call("llvm.x86.avx2.pshuf.b", half, rows, b.bitcast(i, half)), ir.VectorType(i32, 8)
                ),
                b.bitcast(indices, vi32),
            )
            return b.bitcast(looked_up, vi8x64)
        value = self.const(vi8x64, table[0])
        for i, entry in enumerate(table[1:], start=1):
            value = b.select(b.icmp_signed("==", indices, self.const(vi8x64, i)), self.const(vi8x64, entry), value)
        return value

    def dot2(self, acc: ir.Value, weights: ir.Value, x: ir.Value) -> ir.Value:
        """acc [16 f32] + in each lane the products of its two bf16 (i32), the odd one first, each by fma."""
        b = self.b
        if self.isa == "avx512bf16":
            pairs = (b.bitcast(v, vbf16x2) for v in (weights, x))
            return self.call("llvm.x86.avx512bf16.dpbf16ps.512", vf32, acc, *pairs)
        odd_w, odd_x = (b.bitcast(b.and_(v, self.const(vi32, -65536)), vf32) for v in (weights, x))
        even_w, even_x = (b.bitcast(b.shl(v, self.const(vi32, 16)), vf32) for v in (weights, x))
        return self.fma(even_w, even_x, self.fma(odd_w, odd_x, acc))

    def _by_halves(self, op: Callable[..., ir.Value], *vectors: ir.Value) -> ir.Value:
        low = op(*(self.shuffle(v, v, list(range(8))) for v in vectors))
        high = op(*(self.shuffle(v, v, list(range(8, 16))) for v in vectors))
        return self.shuffle(low, high, list(range(16)))


class RowFolder:
    """Takes vectors one by one and folds them as soon as there are two alike, so that few are alive at a time."""

    def __init__(self, emitter: Emitter) -> None:
        self._e = emitter
        self._pending: list[tuple[ir.Value, int]] = []

    def push(self, vector: ir.Value) -> None:
        n = LANES
        while self._pending and self._pending[-1][1] == n:
            vector = self._e.fold(self._pending.pop()[0], vector, n)
            n //= 2
        self._pending.append((vector, n))

    def sums(self) -> ir.Value:
        """After 16 vectors: lane i is the sum of the lanes of vector i."""
        ((folded, n),) = self._pending
        assert n == 1
        return self._e.shuffle(folded, folded, _row_lanes())


class _Loop:
    def __init__(self, builder: ir.IRBuilder, count: ir.Value) -> None:
        self._context = cgutils.for_range(builder, count, intp=i64)

    def __enter__(self) -> ir.Value:
        return self._context.__enter__().index

    def __exit__(self, *exc: Any) -> None:
        self._context.__exit__(*exc)


def _fold_lanes(n: int) -> tuple[list[int], list[int]]:
    """Which lanes of a (0 … 15) and b (16 … 31) are added: pairings that x86 shuffles in one instruction each."""
    if n == 16:
        low = [*range(8), *range(16, 24)]
    elif n == 8:
        low = [source + run + j for source in (0, 16) for run in (0, 8) for j in range(4)]
    elif n == 4:
        low = [lane + source + j for lane in (0, 4, 8, 12) for source in (0, 16) for j in range(2)]
    else:
        low = [lane + source + run for lane in (0, 4, 8, 12) for source in (0, 16) for run in (0, 2)]
    return low, [lane + n // 2 for lane in low]


@functools.cache
def _row_lanes() -> list[int]:
    """The lane in which folding leaves each of 16 rows, found by folding labels."""
    rows, n = [[row] * LANES for row in range(LANES)], LANES
    while len(rows) > 1:
        low, _ = _fold_lanes(n)
        rows = [[(rows[i] + rows[i + 1])[lane] for lane in low] for i in range(0, len(rows), 2)]
        n //= 2
    return [rows[0].index(row) for row in range(LANES)]


def _suffix(type_: ir.Type) -> str:
    if isinstance(type_, ir.VectorType):
        return f"v{type_.count}{_suffix(type_.element)}"
    return {i32: "i32", i64: "i64", f16: "f16", f32: "f32", f64: "f64"}[type_]


def emit(name: str, result: types.Type, arity: int, body: Callable[..., ir.Value | None]) -> Any:
    """An intrinsic whose code ``body(builder, *args)`` emits, of ``arity`` int64 or floating arguments."""

    def typer(typingctx: Any, *args: types.Type) -> Any:
        wanted = [a if isinstance(a, types.Float) else types.int64 for a in args]

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> Any:
            value = body(builder, *values)
            return context.get_dummy_value() if value is None else value

        return result(*wanted), codegen

    parameters = ", ".join(f"a{i}" for i in range(arity))
    source = f"def {name}(typingctx, {parameters}):\n    return typer(typingctx, {parameters})\n"
    scope: dict[str, Any] = {"typer": typer}
    exec(source, scope)
    return intrinsic(scope[name])


# ---- scalars in raw memory: job arguments, block scales -------------------------------------------------------------


def _element(b: ir.IRBuilder, address: ir.Value, index: ir.Value, type_: ir.Type) -> ir.Value:
    # By element pointer rather than by integer arithmetic, in which LLVM's vectoriser sees no consecutive elements.
    return b.gep(b.inttoptr(address, type_.as_pointer()), [index])


def _loader(name: str, numba_type: types.Type, type_: ir.Type, align: int) -> Any:
    def body(b: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
        return b.load(_element(b, address, index, type_), align=align)

    return emit(name, numba_type, 2, body)


load_i64 = _loader("load_i64", types.int64, i64, 8)
load_f64 = _loader("load_f64", types.float64, f64, 8)
load_i32 = _loader("load_i32", types.int32, i32, 4)
load_f32 = _loader("load_f32", types.float32, f32, 4)
load_i8 = _loader("load_i8", types.int8, i8, 1)
load_u8 = _loader("load_u8", types.uint8, i8, 1)
load_u16 = _loader("load_u16", types.uint16, i16, 2)


def _load_f16(b: ir.IRBuilder, address: ir.Value, index: ir.Value) -> ir.Value:
    return b.fpext(b.load(_element(b, address, index, f16), align=2), f32)


load_f16 = emit("load_f16", types.float32, 2, _load_f16)


def _storer(name: str, type_: ir.Type, align: int) -> Any:
    def body(b: ir.IRBuilder, address: ir.Value, index: ir.Value, value: ir.Value) -> None:
        if isinstance(type_, ir.IntType) and type_.width < 64:
            value = b.trunc(value, type_)
        elif type_ is f16:
            value = b.fptrunc(value, f16)
        b.store(value, _element(b, address, index, type_), align=align)

    return emit(name, types.void, 3, body)


store_i64 = _storer("store_i64", i64, 8)
store_f64 = _storer("store_f64", f64, 8)
store_i32 = _storer("store_i32", i32, 4)
store_f32 = _storer("store_f32", f32, 4)
store_f16 = _storer("store_f16", f16, 2)

bits_f32 = emit("bits_f32", types.float32, 1, lambda b, bits: b.bitcast(b.trunc(bits, i32), f32))
"""The float32 whose bits are the low 32 of the argument."""

exp_f32 = emit("exp_f32", types.float32, 1, lambda b, x: Emitter(b).exp(x))


# ---- atomics, waiting, calling ---------------------------------------------------------------------------------------


def _pointer(b: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return b.inttoptr(address, i64.as_pointer())


atomic_load = emit("atomic_load", types.int64, 1, lambda b, p: b.load_atomic(_pointer(b, p), "seq_cst", 8))
atomic_add = emit("atomic_add", types.int64, 2, lambda b, p, v: b.atomic_rmw("add", _pointer(b, p), v, "seq_cst"))


def _atomic_store(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    b.store_atomic(value, _pointer(b, address), "seq_cst", 8)


atomic_store = emit("atomic_store", types.void, 2, _atomic_store)


def _compare_and_swap(b: ir.IRBuilder, address: ir.Value, expected: ir.Value, desired: ir.Value) -> ir.Value:
    result = b.cmpxchg(_pointer(b, address), expected, desired, "seq_cst", "seq_cst")
    return b.zext(b.extract_value(result, 1), i64)


compare_and_swap = emit("compare_and_swap", types.int64, 3, _compare_and_swap)
"""1 if memory held ``expected`` and now holds ``desired``, else 0."""


def _pause(b: ir.IRBuilder, dummy: ir.Value) -> None:
    if platform.machine().lower() in ("x86_64", "amd64"):
        Emitter(b).call("llvm.x86.sse2.pause", ir.VoidType())


pause = emit("pause", types.void, 1, _pause)
"""Tell the core that this is a spin loop. (The argument is unused.)"""


def prefetch_l2(nbytes: int) -> Any:
    """An intrinsic: ask for the ``nbytes`` bytes at an address, into L2."""
    return emit("prefetch_l2", types.void, 1, lambda b, address: Emitter(b).prefetch(address, nbytes, level=2))


def _yield_core(b: ir.IRBuilder, dummy: ir.Value) -> None:
    if sys.platform != "win32":
        Emitter(b).call("sched_yield", i32)


yield_core = emit("yield_core", types.void, 1, _yield_core)
"""Let another thread have this core. (The argument is unused.)"""

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129


def _syscall(b: ir.IRBuilder, *args: ir.Value) -> ir.Value:
    signature = ir.FunctionType(i64, [i64], var_arg=True)
    return b.call(cgutils.get_or_insert_function(b.module, signature, "syscall"), list(args))


def _wait_while_equal(b: ir.IRBuilder, address: ir.Value, value: ir.Value) -> None:
    if _FUTEX is not None:
        zero = ir.Constant(i64, 0)
        _syscall(b, i64(_FUTEX), address, i64(_FUTEX_WAIT_PRIVATE), value, zero, zero, zero)
    elif sys.platform != "win32":
        Emitter(b).call("usleep", i32, ir.Constant(i32, 200))


wait_while_equal = emit("wait_while_equal", types.void, 2, _wait_while_equal)
"""Sleep until ``wake_all`` of this address, unless the int32 there differs from the value (elsewhere: 200 µs)."""


def _wake_all(b: ir.IRBuilder, address: ir.Value) -> None:
    if _FUTEX is not None:
        zero = ir.Constant(i64, 0)
        _syscall(b, i64(_FUTEX), address, i64(_FUTEX_WAKE_PRIVATE), i64(2**31 - 1), zero, zero, zero)


wake_all = emit("wake_all", types.void, 1, _wake_all)


def _call_kernel(b: ir.IRBuilder, function: ir.Value, begin: ir.Value, end: ir.Value, args: ir.Value) -> None:
    signature = ir.FunctionType(ir.VoidType(), [i64, i64, i64])
    b.call(b.inttoptr(function, signature.as_pointer()), [begin, end, args])


call_kernel = emit("call_kernel", types.void, 4, _call_kernel)
"""Call the kernel at an address: kernel(begin, end, args)."""


def _call_command(b: ir.IRBuilder, function: ir.Value, team: ir.Value, args: ir.Value) -> None:
    signature = ir.FunctionType(ir.VoidType(), [i64, i64])
    b.call(b.inttoptr(function, signature.as_pointer()), [team, args])


call_command = emit("call_command", types.void, 3, _call_command)
"""Call the command at an address: command(team, args)."""


def load_words(codes: str) -> Any:
    """An intrinsic: a tuple of the words from an address on, int64 where the code is q and float64 where it is d."""
    result = types.BaseTuple.from_types([{"q": types.int64, "d": types.float64}[code] for code in codes])

    @intrinsic
    def load(typing_context: Any, address: types.Type) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
            e = Emitter(builder)
            words = [e.load(e.at(args[0], i, 8), {"q": i64, "d": f64}[code], 8) for i, code in enumerate(codes)]
            return context.make_tuple(builder, result, words)

        return result(types.int64), codegen

    return load


@intrinsic
def words_of(typing_context: Any, values: types.BaseTuple) -> Any:
    """A tuple's numbers as int64 and float64, the address of an array in its place, 0 in that of None."""
    wanted = [types.float64 if isinstance(type_, types.Float) else types.int64 for type_ in values]
    result = types.BaseTuple.from_types(wanted)

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        words = []
        for i, (type_, to) in enumerate(zip(values, wanted, strict=True)):
            value = builder.extract_value(args[0], i)
            if isinstance(type_, types.Array):
                words.append(builder.ptrtoint(context.make_array(type_)(context, builder, value).data, i64))
            elif isinstance(type_, types.NoneType):
                words.append(ir.Constant(i64, 0))
            else:
                words.append(context.cast(builder, value, type_, to))
        return context.make_tuple(builder, result, words)

    return result(values), codegen


def stack_bytes(size: int) -> Any:
    """An intrinsic: address of ``size`` bytes of the calling function's stack, 64-aligned, one place per mention."""

    def body(b: ir.IRBuilder, dummy: ir.Value) -> ir.Value:
        with b.goto_entry_block():  # by hand: ``alloca_once`` fills with zeros, value by value
            place = b.alloca(ir.ArrayType(i8, size))
        place.align = 64
        return b.ptrtoint(place, i64)

    return emit("stack_bytes", types.int64, 1, body)


def _pointer_caster(name: str, numba_type: types.Type, type_: ir.Type) -> Any:
    return emit(name, types.CPointer(numba_type), 1, lambda b, address: b.inttoptr(address, type_.as_pointer()))


pointer_f32 = _pointer_caster("pointer_f32", types.float32, f32)
pointer_i64 = _pointer_caster("pointer_i64", types.int64, i64)
pointer_i32 = _pointer_caster("pointer_i32", types.int32, i32)
"""The address as what ``numba.carray`` takes."""

f32_bits = emit("f32_bits", types.int64, 1, lambda b, x: b.zext(b.bitcast(x, i32), i64))
"""The bits of a float32, 0 … 2^32 - 1."""
