"""Shuffles, votes, matches, reductions within a warp, and the matrix instructions."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.ptx import PtxDevice, PtxError
from tests.ptx.rounding import BF16, E4M3, F16, by_rule
from tests.ptx.snippets import run
from tests.ptx.test_opcodes_memory import execute, pointer

VALUES = np.random.default_rng(4).integers(0, 1 << 32, 96, dtype=np.uint64).astype(np.uint32)
WARPS = VALUES.reshape(3, 32)


def shuffled(mode: str, by: int, clamp: int) -> tuple[np.ndarray, np.ndarray]:
    """The pseudocode of the PTX ISA, lane by lane."""
    out, inside = np.zeros_like(WARPS), np.zeros(WARPS.shape, bool)
    segment, bound = clamp >> 8 & 31, clamp & 31
    for lane in range(32):
        highest = (lane & segment) | (bound & ~segment & 31)
        lowest = lane & segment
        match mode:
            case "up":
                source = lane - by
                good = source >= highest
            case "down":
                source = lane + by
                good = source <= highest
            case "bfly":
                source = lane ^ by
                good = source <= highest
            case _:
                source = lowest | (by & ~segment & 31)
                good = source <= highest
        out[:, lane] = WARPS[:, source if good else lane]
        inside[:, lane] = good
    return out.reshape(-1), inside.reshape(-1)


@pytest.mark.parametrize(
    ("mode", "by", "clamp"),
    [
        ("down", 16, 31),
        ("down", 3, 31),
        ("up", 5, 0),
        ("bfly", 1, 31),
        ("bfly", 16, 31),
        ("idx", 7, 31),
        ("down", 4, 0x181F),
        ("up", 2, 0x1800),
        ("idx", 3, 0x181F),
        ("bfly", 8, 0x181F),
    ],
)
def test_shuffles(device: PtxDevice, mode: str, by: int, clamp: int) -> None:
    value, inside = shuffled(mode, by, clamp)
    code = f"shfl.sync.{mode}.b32 {{d}}|%p0, {{a}}, {by}, {clamp}, 0xffffffff;"
    assert (run(device, code, [VALUES], np.uint32) == value).all()
    assert (run(device, code + "selp.u32 {d}, 1, 0, %p0;", [VALUES], np.uint32) == inside).all()


def test_shuffle_by_a_different_lane_each(device: PtxDevice) -> None:
    by = np.random.default_rng(5).integers(0, 32, 96).astype(np.uint32)
    got = run(device, "shfl.sync.idx.b32 {d}, {a}, {b}, 31, -1;", [VALUES, by], np.uint32)
    assert (got.reshape(3, 32) == np.take_along_axis(WARPS, by.reshape(3, 32).astype(int), axis=1)).all()


def test_divergent_half_warps_shuffle_among_themselves(device: PtxDevice) -> None:
    code = """mov.u32 %t0, %laneid; setp.ge.u32 %p0, %t0, 16; @%p0 bra upper;
    shfl.sync.bfly.b32 {d}, {a}, 1, 31, 0xffff; bra end;
upper: shfl.sync.bfly.b32 {d}, {a}, 2, 31, 0xffff0000;
end:"""
    want = np.where(np.arange(32) < 16, WARPS[:, np.arange(32) ^ 1], WARPS[:, np.arange(32) ^ 2])
    assert (run(device, code, [VALUES], np.uint32).reshape(3, 32) == want).all()


def test_votes_match_redux_elect(device: PtxDevice) -> None:
    small = VALUES % 5
    warps = small.reshape(3, 32)
    odd = (warps % 2).astype(bool)

    def per_warp(values: np.ndarray) -> np.ndarray:
        return np.repeat(np.asarray(values, np.uint64), 32)

    bits = (odd * (1 << np.arange(32, dtype=np.uint64))).sum(axis=1)
    prologue = "and.b32 %t0, {a}, 1; setp.ne.u32 %p0, %t0, 0;"
    cases = {
        "vote.sync.ballot.b32 {d}, %p0, -1;": bits,
        "vote.sync.any.pred %p1, %p0, -1; selp.u32 {d}, 1, 0, %p1;": odd.any(axis=1),
        "vote.sync.all.pred %p1, !%p0, -1; selp.u32 {d}, 1, 0, %p1;": (~odd).all(axis=1),
        "vote.sync.uni.pred %p1, %p0, -1; selp.u32 {d}, 1, 0, %p1;": odd.all(axis=1) | ~odd.any(axis=1),
        "activemask.b32 {d};": [0xFFFFFFFF] * 3,
        "redux.sync.add.u32 {d}, {a}, -1;": warps.sum(axis=1),
        "redux.sync.min.u32 {d}, {a}, -1;": warps.min(axis=1),
        "redux.sync.max.s32 {d}, {a}, -1;": warps.max(axis=1),
        "redux.sync.xor.b32 {d}, {a}, -1;": np.bitwise_xor.reduce(warps, axis=1),
        "redux.sync.or.b32 {d}, {a}, -1;": np.bitwise_or.reduce(warps, axis=1),
        "redux.sync.and.b32 {d}, {a}, -1;": np.bitwise_and.reduce(warps, axis=1),
        "elect.sync {d}|%p1, -1;": [0, 0, 0],
    }
    for code, want in cases.items():
        assert (run(device, prologue + code, [small], np.uint32) == per_warp(want)).all(), code
    leaders = run(device, "elect.sync _|%p1, -1; selp.u32 {d}, 1, 0, %p1;", [small], np.uint32)
    assert (leaders == (np.arange(96) % 32 == 0)).all()
    same = (warps[:, :, None] == warps[:, None, :]) @ (1 << np.arange(32, dtype=np.int64))
    assert (run(device, "match.any.sync.b32 {d}, {a}, -1;", [small], np.uint32) == same.reshape(-1)).all()
    got = run(device, "match.all.sync.b32 {d}|%p1, {a}, -1;", [small // 8], np.uint32)
    assert (got == 0xFFFFFFFF).all()


def test_shuffle_names_a_lane_that_does_not_come(device: PtxDevice) -> None:
    code = """mov.u32 %t0, %tid.x; mov.u32 {d}, 0; setp.eq.u32 %p0, %t0, 37; @%p0 bra end;
    shfl.sync.bfly.b32 {d}, {a}, 1, 31, -1;
end: bar.sync 0;"""
    with pytest.raises(PtxError, match=r"lane 5 is named .* does not arrive; thread \(37, 0, 0\)") as caught:
        run(device, code, [VALUES], np.uint32)
    assert caught.value.kind == "divergent-warp"
    assert caught.value.text.startswith("shfl.sync.bfly")


MMA = """
.visible .entry k(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u64 pd) {{
    .reg .b32 %a<4>; .reg .b32 %b<2>; .reg .b32 %c<4>; .reg .b32 %d<4>; .reg .b32 %r<2>; .reg .b64 %q<4>;
    mov.u32 %r0, %tid.x;
    ld.param.u64 %q0, [pa]; mad.wide.u32 %q0, %r0, {a_bytes}, %q0;
    ld.param.u64 %q1, [pb]; mad.wide.u32 %q1, %r0, {b_bytes}, %q1;
    ld.param.u64 %q2, [pc]; mad.wide.u32 %q2, %r0, {c_bytes}, %q2;
    ld.param.u64 %q3, [pd]; mad.wide.u32 %q3, %r0, {c_bytes}, %q3;
    {loads}
    mma.sync.aligned.{form} {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};
    {stores}
    ret;
}}"""


def fragments(matrix: np.ndarray, part: str, elements: int) -> np.ndarray:
    """[lanes, registers, elements] of a matrix, by the ISA's tables."""
    lanes = []
    rows, columns = matrix.shape
    for lane in range(32):
        group, thread = lane // 4, lane % 4
        registers = []
        if part == "c":
            registers = [[matrix[group + 8 * half, 2 * thread + j] for j in range(2)] for half in range(2)]
        elif part == "a":
            for r in range(16 * columns // 32 // elements):
                row, base = group + 8 * (r % 2), 4 * elements * (r // 2)
                registers.append([matrix[row, base + elements * thread + j] for j in range(elements)])
        else:
            for r in range(8 * rows // 32 // elements):
                base = 4 * elements * r
                registers.append([matrix[base + elements * thread + j, group] for j in range(elements)])
        lanes.append(registers)
    return np.array(lanes)


FORMS = [
    ("m16n8k16.row.col.f32.bf16.bf16.f32", "bf16", 16),
    ("m16n8k16.row.col.f32.f16.f16.f32", "f16", 16),
    ("m16n8k16.row.col.f16.f16.f16.f16", "f16", 16),
    ("m16n8k8.row.col.f32.bf16.bf16.f32", "bf16", 8),
    ("m16n8k8.row.col.f32.tf32.tf32.f32", "tf32", 8),
    ("m16n8k4.row.col.f32.tf32.tf32.f32", "tf32", 4),
    ("m16n8k32.row.col.s32.s8.s8.s32", "s8", 32),
    ("m16n8k16.row.col.s32.u8.s8.s32", "u8", 16),
    ("m16n8k32.row.col.f32.e4m3.e4m3.f32", "e4m3", 32),
]


@pytest.mark.parametrize(("form", "kind", "depth"), FORMS, ids=[form for form, _, _ in FORMS])
def test_mma(device: PtxDevice, form: str, kind: str, depth: int) -> None:
    rng = np.random.default_rng(depth)
    elements = {"bf16": 2, "f16": 2, "tf32": 1, "s8": 4, "u8": 4, "e4m3": 4}[kind]
    if kind in ("s8", "u8"):
        a = rng.integers(0, 256, (16, depth)) if kind == "u8" else rng.integers(-128, 128, (16, depth))
        b = rng.integers(-128, 128, (depth, 8))
        c = rng.integers(-(10**6), 10**6, (16, 8))
        a_bits, b_bits = a.astype(np.int64).astype(np.uint8), b.astype(np.int8).view(np.uint8)
    else:
        a, b = (np.round(rng.standard_normal(shape) * 8) / 8 for shape in ((16, depth), (depth, 8)))
        c = np.round(rng.standard_normal((16, 8)) * 8) / 8
        if kind == "tf32":
            a_bits, b_bits = (x.astype(np.float32).view(np.uint32) for x in (a, b))
        else:
            format = {"bf16": BF16, "f16": F16, "e4m3": E4M3}[kind]
            a_bits, b_bits = (
                by_rule(lambda v: v, lambda v: v, format, "rn", x.reshape(-1)).reshape(x.shape) for x in (a, b)
            )
            if kind == "e4m3":
                a, b = (np.vectorize(from_e4m3)(x) for x in (a_bits, b_bits))
    want = a @ b + c
    accumulate = form.split(".")[3]
    c_dtype = {"f32": np.float32, "f16": np.float16, "s32": np.int32}[accumulate]
    a_data, b_data = fragments(a_bits, "a", elements), fragments(b_bits, "b", elements)
    c_data = fragments(c.astype(c_dtype), "c", 2)
    arrays = [device.upload(np.ascontiguousarray(data)) for data in (a_data, b_data, c_data, np.zeros_like(c_data))]
    counts = [array.nbytes // 32 // 4 for array in arrays]
    names = {
        letter: ", ".join(f"%{letter}{i}" for i in range(count)) for letter, count in zip("abcd", counts, strict=True)
    }
    loads = "".join(
        f"ld.global.b32 %{letter}{i}, [%q{place}+{4 * i}]; "
        for place, letter in enumerate("abc")
        for i in range(counts[place])
    )
    stores = "".join(f"st.global.b32 [%q3+{4 * i}], %d{i}; " for i in range(counts[3]))
    text = MMA.format(
        form=form,
        a_bytes=4 * counts[0],
        b_bytes=4 * counts[1],
        c_bytes=4 * counts[2],
        loads=loads,
        stores=stores,
        **names,
    )
    execute(device, text, [pointer(array) for array in arrays])
    assert (device.download(arrays[3]) == fragments(want.astype(c_dtype), "c", 2)).all()


def from_e4m3(bits: int) -> float:
    bits = int(bits)
    exponent, fraction = bits >> 3 & 15, bits & 7
    magnitude = fraction * 2.0**-9 if exponent == 0 else (8 + fraction) * 2.0 ** (exponent - 10)
    return -magnitude if bits & 0x80 else magnitude


MATRIX_LOAD = """
.shared .align 16 .b8 tile[1024];
.visible .entry k(.param .u64 out, .param .u64 src) {{
    .reg .b32 %r<16>; .reg .b64 %d<4>; .reg .pred %p<2>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, tile; ld.param.u64 %d0, [src]; ld.param.u64 %d1, [out];
    mad.wide.u32 %d0, %r0, 16, %d0; ld.global.v4.u32 {{%r2, %r3, %r4, %r5}}, [%d0];
    mad.lo.u32 %r6, %r0, 16, %r1; st.shared.v4.u32 [%r6], {{%r2, %r3, %r4, %r5}};
    bar.warp.sync -1;
    xor.b32 %r7, %r0, 1; mad.lo.u32 %r7, %r7, 16, %r1;
    ldmatrix.sync.aligned.m8n8.{form}.shared.b16 {{{regs}}}, [%r7];
    {stores}
    ret;
}}"""


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("transposed", [False, True])
def test_ldmatrix(device: PtxDevice, count: int, transposed: bool) -> None:
    """Rows are addressed in swapped pairs; lane l gets elements 2 (l % 4) and the next of row l / 4."""
    tile = np.arange(256, dtype=np.uint16).reshape(32, 8)
    source, out = device.upload(tile), device.upload(np.zeros((32, count, 2), np.uint16))
    stores = f"mad.wide.u32 %d1, %r0, {4 * count}, %d1; " + " ".join(
        f"st.global.u32 [%d1+{4 * i}], %r{8 + i};" for i in range(count)
    )
    registers = ", ".join(f"%r{8 + i}" for i in range(count))
    form = f"x{count}" + (".trans" if transposed else "")
    execute(device, MATRIX_LOAD.format(form=form, regs=registers, stores=stores), [pointer(out), pointer(source)])
    swapped = tile[np.arange(32) ^ 1].reshape(4, 8, 8)
    want = np.zeros((32, count, 2), np.uint16)
    for lane in range(32):
        for m in range(count):
            matrix = swapped[m].T if transposed else swapped[m]
            want[lane, m] = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
    assert (device.download(out) == want).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_is_the_inverse_of_ldmatrix(device: PtxDevice, transposed: bool) -> None:
    trans = ".trans" if transposed else ""
    text = MATRIX_LOAD.format(
        form="x4" + trans,
        regs="%r8, %r9, %r10, %r11",
        stores=f"""bar.warp.sync -1; mad.lo.u32 %r12, %r0, 16, %r1;
    stmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 [%r12], {{%r8, %r9, %r10, %r11}};
    bar.warp.sync -1; ld.shared.v4.u32 {{%r2, %r3, %r4, %r5}}, [%r12]; mad.wide.u32 %d1, %r0, 16, %d1;
    st.global.v4.u32 [%d1], {{%r2, %r3, %r4, %r5}};""",
    )
    tile = np.random.default_rng(6).integers(0, 1 << 16, (32, 8)).astype(np.uint16)
    source, out = device.upload(tile), device.upload(np.zeros_like(tile))
    execute(device, text, [pointer(out), pointer(source)])
    assert (device.download(out) == tile[np.arange(32) ^ 1]).all()
