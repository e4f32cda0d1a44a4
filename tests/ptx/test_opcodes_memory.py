"""Loads, stores, atomics and asynchronous copies in every space, from hand-written PTX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from numba_engine.backends.ptx import PtxArray, PtxDevice, PtxError
from tests.ptx.snippets import HEADER, run


def execute(
    device: PtxDevice, text: str, arguments: list[Any], *, grid: Any = 1, block: Any = 32, **options: Any
) -> None:
    device.execute(device.load(HEADER + text, name="k"), grid, block, arguments, **options)


def pointer(array: PtxArray) -> int:
    return array.pointer


COPY = """
.visible .entry k(.param .u64 out, .param .u64 src) {{
    .reg .b16 %h<8>; .reg .b32 %r<9>; .reg .f32 %f<8>; .reg .b64 %d<8>; .reg .f64 %e<8>;
    mov.u32 %r0, %tid.x;
    ld.param.u64 %d0, [out]; ld.param.u64 %d1, [src];
    mad.wide.u32 %d2, %r0, {size}, %d0; mad.wide.u32 %d3, %r0, {size}, %d1;
    {load} [%d3];
    {store};
    ret;
}}"""

COPIES = [
    (1, "ld.global.u8 %h1,", "st.global.u8 [%d2], %h1"),
    (2, "ld.global.nc.u16 %h1,", "st.global.u16 [%d2], %h1"),
    (4, "ld.global.ca.b32 %r1,", "st.global.wt.b32 [%d2], %r1"),
    (4, "ldu.global.f32 %f1,", "st.global.f32 [%d2], %f1"),
    (8, "ld.volatile.global.f64 %e1,", "st.volatile.global.f64 [%d2], %e1"),
    (8, "ld.acquire.gpu.global.u64 %d4,", "st.release.gpu.global.u64 [%d2], %d4"),
    (2, "ld.global.v2.u8 {%h1, %h2},", "st.global.v2.u8 [%d2], {%h1, %h2}"),
    (8, "ld.global.nc.v4.u16 {%h1, %h2, %h3, %h4},", "st.global.v4.u16 [%d2], {%h1, %h2, %h3, %h4}"),
    (8, "ld.global.nc.L1::no_allocate.v2.f32 {%f1, %f2},", "st.global.v2.f32 [%d2], {%f1, %f2}"),
    (16, "ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%r1, %r2, %r3, %r4},", "st.global.v4.b32 [%d2], {%r1, %r2, %r3, %r4}"),  # noqa: E501
    (16, "ld.global.v2.b64 {%d4, %d5},", "st.global.cs.v2.b64 [%d2], {%d4, %d5}"),
    (4, "ld.u32 %r1,", "st.u32 [%d2], %r1"),
    (32, "ld.global.v8.b32 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8},", "st.global.v8.b32 [%d2], {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}"),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(("size", "load", "store"), COPIES, ids=[load for _, load, _ in COPIES])
def test_global_copies(device: PtxDevice, size: int, load: str, store: str) -> None:
    data = np.random.default_rng(size).integers(0, 256, 32 * size).astype(np.uint8)
    source, out = device.upload(data), device.upload(np.zeros_like(data))
    execute(device, COPY.format(size=size, load=load, store=store), [pointer(out), pointer(source)])
    assert (device.download(out) == data).all()


@pytest.mark.parametrize(
    ("kind", "register", "out"),
    [("s8", "%h1", np.int16), ("u8", "%h1", np.uint16), ("s8", "%r1", np.int32), ("u16", "%r1", np.uint32), ("s16", "%d4", np.int64), ("s32", "%d4", np.int64)],  # noqa: E501
)  # fmt: skip
def test_loads_extend_to_the_register(device: PtxDevice, kind: str, register: str, out: Any) -> None:
    of = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
    data = np.random.default_rng(1).integers(0, 256, 32 * of.itemsize).astype(np.uint8).view(of)
    source, target = device.upload(data), device.upload(np.zeros(32, out))
    size = np.dtype(out).itemsize
    text = COPY.format(
        size=size, load=f"ld.global.{kind} {register},", store=f"st.global.b{8 * size} [%d2], {register}"
    )
    text = text.replace(f"%d3, %r0, {size}", f"%d3, %r0, {of.itemsize}")
    execute(device, text, [pointer(target), pointer(source)])
    assert (device.download(target) == data).all()


def test_shared_static_dynamic_and_barrier(device: PtxDevice) -> None:
    """Each thread reads what its mirror wrote, through a static and a dynamic array, by generic address too."""
    text = """
.shared .align 4 .b8 fixed[256];
.extern .shared .align 16 .b8 dynamic[];
.visible .entry k(.param .u64 out) {
    .reg .b32 %r<10>; .reg .b64 %d<8>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x;
    mad.lo.u32 %r2, %r1, 1000, %r0;
    mov.u32 %r3, fixed; mad.lo.u32 %r4, %r0, 4, %r3; st.shared.u32 [%r4], %r2;
    mov.u64 %d0, dynamic; mul.wide.u32 %d1, %r0, 8; add.u64 %d1, %d0, %d1;
    cvta.shared.u64 %d2, %d1; st.u32 [%d2+4], %r2;
    bar.sync 0;
    sub.u32 %r5, 63, %r0;
    mad.lo.u32 %r4, %r5, 4, %r3; ld.shared.u32 %r6, [%r4];
    mul.wide.u32 %d1, %r5, 8; add.u64 %d1, %d0, %d1; ld.shared.u32 %r7, [%d1+4];
    mul.lo.u32 %r7, %r7, 2; add.u32 %r6, %r6, %r7;
    ld.param.u64 %d3, [out]; mad.lo.u32 %r8, %r1, 64, %r0; mad.wide.u32 %d3, %r8, 4, %d3;
    st.global.u32 [%d3], %r6;
    ret;
}"""
    out = device.upload(np.zeros((5, 64), np.uint32))
    execute(device, text, [pointer(out)], grid=5, block=64, shared_bytes=512)
    want = 3 * (np.arange(5)[:, None] * 1000 + 63 - np.arange(64))
    assert (device.download(out) == want).all()


def test_dynamic_shared_memory_has_many_names(device: PtxDevice) -> None:
    """All external arrays begin at the same place, behind the static ones."""
    text = """
.extern .shared .align 16 .b8 words[];
.shared .align 4 .b8 fixed[4];
.extern .shared .align 16 .b8 floats[];
.visible .entry k(.param .u64 out) {
    .reg .b32 %r<8>; .reg .b64 %d<2>; .reg .pred %p<1>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, words; mov.u32 %r2, floats;
    setp.eq.u32 %p0, %r0, 0; @%p0 st.shared.u32 [fixed], 99;
    mad.lo.u32 %r3, %r0, 4, %r1; mul.lo.u32 %r4, %r0, 5; st.shared.u32 [%r3], %r4;
    bar.sync 0;
    sub.u32 %r5, 31, %r0; mad.lo.u32 %r3, %r5, 4, %r2; ld.shared.u32 %r6, [%r3];
    ld.param.u64 %d0, [out]; mad.wide.u32 %d0, %r0, 4, %d0; st.global.u32 [%d0], %r6;
    ret;
}"""
    out = device.upload(np.zeros(32, np.uint32))
    execute(device, text, [pointer(out)], block=32, shared_bytes=128)
    assert device.download(out).tolist() == [5 * i for i in range(31, -1, -1)]


NON_COHERENT = """
.visible .entry k(.param .u64 data, .param .u64 out, .param .u32 written) {
    .reg .b32 %r<6>; .reg .b64 %d<6>; .reg .pred %p<1>;
    mov.u32 %r0, %tid.x; ld.param.u64 %d0, [data]; ld.param.u64 %d1, [out]; ld.param.u32 %r1, [written];
    mul.wide.u32 %d2, %r0, 16; add.u64 %d3, %d0, %d2; add.u64 %d4, %d1, %d2;
    setp.lt.u32 %p0, %r0, %r1; @%p0 WRITE;
    bar.sync 0;
    ld.global.nc.v2.u32 {%r2, %r3}, [%d3+8];
    st.global.v2.u32 [%d4], {%r2, %r3};
    ret;
}"""


@pytest.mark.parametrize(
    ("write", "threads", "is_wrong"),
    [
        ("st.global.u32 [%d3+12], 7", 6, True),
        ("red.global.add.u32 [%d3+8], 1", 6, True),
        ("st.global.u8 [%d3+11], 7", 6, True),
        ("st.global.v2.u32 [%d3], {%r0, %r0}", 6, False),
        ("st.global.u32 [%d3+12], 7", 0, False),
    ],
    ids=["word", "atomic", "byte", "neighbours", "nobody"],
)
def test_non_coherent_loads_of_what_the_launch_writes(write: str, threads: int, is_wrong: bool) -> None:
    device = PtxDevice(memory_bytes=1 << 20)
    data, out = device.upload(np.zeros(32 * 4, np.uint32), "data"), device.upload(np.zeros(32 * 4, np.uint32))
    arguments = [pointer(data), pointer(out), threads]
    text = NON_COHERENT.replace("WRITE", write)
    if not is_wrong:
        for _ in range(2):  # what a launch before has written may be read
            execute(device, text, arguments, block=32)
            device.write(data, np.arange(128, dtype=np.uint32))
        return
    with pytest.raises(PtxError, match="data byte 8 of 512") as caught:
        execute(device, text, arguments, block=32)
    assert caught.value.kind == "non-coherent-read"
    assert caught.value.thread == (0, 0, 0)
    execute(device, text, [*arguments[:2], 0], block=32)


def test_local_and_constant_memory(device: PtxDevice) -> None:
    text = """
.const .align 4 .u32 table[4] = {10, 20, 0x1E, 40};
.global .align 4 .f32 scale = 0f40000000;
.visible .entry k(.param .u64 out) {
    .local .align 4 .b8 depot[16];
    .reg .b32 %r<10>; .reg .b64 %d<10>; .reg .f32 %f<4>;
    mov.u32 %r0, %tid.x;
    mov.u64 %d0, depot; cvta.local.u64 %d1, %d0;
    and.b32 %r1, %r0, 3; mul.wide.u32 %d2, %r1, 4;
    mov.u64 %d3, table; add.u64 %d3, %d3, %d2; ld.const.u32 %r2, [%d3];
    add.u64 %d4, %d0, %d2; st.local.u32 [%d4], %r2;
    add.u64 %d5, %d1, %d2; ld.u32 %r3, [%d5];
    add.u32 %r3, %r3, %r0;
    ld.global.f32 %f0, [scale]; cvt.rzi.u32.f32 %r4, %f0; mul.lo.u32 %r3, %r3, %r4;
    ld.param.u64 %d6, [out]; mad.wide.u32 %d6, %r0, 4, %d6; st.global.u32 [%d6], %r3;
    ret;
}"""
    out = device.upload(np.zeros(40, np.uint32))
    execute(device, text, [pointer(out)], block=40)
    assert (device.download(out) == 2 * (np.array([10, 20, 30, 40])[np.arange(40) % 4] + np.arange(40))).all()


def test_scalar_parameters(device: PtxDevice) -> None:
    text = """
.visible .entry k(
    .param .u64 out, .param .u8 a, .param .s16 b, .param .u32 c, .param .f32 x, .param .f64 y, .param .b64 z
) {
    .reg .b16 %h<4>; .reg .b32 %r<10>; .reg .b64 %d<10>; .reg .f32 %f<4>; .reg .f64 %e<4>;
    ld.param.u64 %d0, [out];
    ld.param.u8 %h0, [a]; cvt.s64.u8 %d1, %h0; st.global.u64 [%d0], %d1;
    ld.param.s16 %d2, [b]; st.global.u64 [%d0+8], %d2;
    ld.param.u32 %r0, [c]; cvt.u64.u32 %d3, %r0; st.global.u64 [%d0+16], %d3;
    ld.param.f32 %f0, [x]; cvt.f64.f32 %e0, %f0; st.global.f64 [%d0+24], %e0;
    ld.param.f64 %e1, [y]; st.global.f64 [%d0+32], %e1;
    mov.b64 %d5, z; ld.param.u64 %d6, [%d5]; st.global.u64 [%d0+40], %d6;
    ret;
}"""
    out = device.upload(np.zeros(6, np.uint64))
    execute(device, text, [pointer(out), True, -5, 2**32 - 1, 1.5, -0.1, 2**63 + 1], block=1)
    got = device.download(out)
    assert got[:3].view(np.int64).tolist() == [1, -5, 2**32 - 1]
    assert got[3:5].view(np.float64).tolist() == [1.5, -0.1]
    assert int(got[5]) == 2**63 + 1


ATOMICS: list[tuple[str, Callable[[int, int], int], int]] = [
    ("add.u32", lambda old, v: (old + v) & 0xFFFFFFFF, 7),
    ("min.u32", min, 0xFFFFFFF0),
    ("max.u32", max, 3),
    ("min.s32", lambda old, v: min(old, v, key=lambda u: u - (u >> 31 << 32)), 5),
    ("max.s32", lambda old, v: max(old, v, key=lambda u: u - (u >> 31 << 32)), 0xFFFFFFF0),
    ("and.b32", lambda old, v: old & v, 0xFFFFFFFF),
    ("or.b32", lambda old, v: old | v, 0),
    ("xor.b32", lambda old, v: old ^ v, 1),
    ("exch.b32", lambda old, v: v, 1),
    ("inc.u32", lambda old, v: 0 if old >= v else old + 1, 3),
    ("dec.u32", lambda old, v: v if old == 0 or old > v else old - 1, 3),
    ("add.acq_rel.gpu.u32", lambda old, v: (old + v) & 0xFFFFFFFF, 7),
]


@pytest.mark.parametrize("space", ["global", "shared"])
@pytest.mark.parametrize(("operation", "function", "start"), ATOMICS, ids=[name for name, _, _ in ATOMICS])
def test_atomics(
    device: PtxDevice, space: str, operation: str, function: Callable[[int, int], int], start: int
) -> None:
    """All lanes hit two words; every old value and the final ones equal taking turns in lane order."""
    *name, kind = operation.split(".")
    qualifiers = ".".join(name[1:])
    code = ".".join(part for part in ("atom", qualifiers, space, name[0], kind) if part)
    text = f"""
.shared .align 4 .u32 words[2];
.visible .entry k(.param .u64 out, .param .u64 final, .param .u64 values, .param .u32 start) {{
    .reg .b32 %r<10>; .reg .b64 %d<10>; .reg .pred %p<3>;
    mov.u32 %r0, %tid.x; and.b32 %r1, %r0, 1; mul.wide.u32 %d9, %r1, 4;
    ld.param.u32 %r2, [start];
    ld.param.u64 %d0, [final]; {"mov.u64 %d0, words;" if space == "shared" else ""}
    setp.lt.u32 %p0, %r0, 2; add.u64 %d1, %d0, %d9;
    @%p0 st.{space}.u32 [%d1], %r2;
    bar.sync 0;
    ld.param.u64 %d2, [values]; mad.wide.u32 %d2, %r0, 4, %d2; ld.global.u32 %r3, [%d2];
    {code} %r4, [%d1], %r3;
    ld.param.u64 %d3, [out]; mad.wide.u32 %d3, %r0, 4, %d3; st.global.u32 [%d3], %r4;
    bar.sync 0;
    ld.{space}.u32 %r5, [%d1]; ld.param.u64 %d4, [final]; add.u64 %d4, %d4, %d9;
    @%p0 st.global.u32 [%d4], %r5;
    ret;
}}"""
    values = np.random.default_rng(2).integers(0, 1 << 32, 64, dtype=np.uint64).astype(np.uint32)
    values[::3] = values[::3] % 5
    arrays = [device.upload(np.zeros(n, np.uint32)) for n in (64, 2)] + [device.upload(values)]
    execute(device, text, [*map(pointer, arrays), start], block=64)
    words, old = [start, start], []
    for lane, value in enumerate(values.tolist()):
        old.append(words[lane & 1])
        words[lane & 1] = function(words[lane & 1], value)
    assert device.download(arrays[0]).tolist() == old
    assert device.download(arrays[1]).tolist() == words


def test_float_atomics_and_cas(device: PtxDevice) -> None:
    text = """
.visible .entry k(.param .u64 sums, .param .u64 owner) {
    .reg .b32 %r<10>; .reg .b64 %d<10>; .reg .f32 %f<4>; .reg .f64 %e<4>;
    mov.u32 %r0, %tid.x; cvt.rn.f32.u32 %f0, %r0; cvt.f64.f32 %e0, %f0;
    ld.param.u64 %d0, [sums]; ld.param.u64 %d1, [owner];
    red.global.add.f32 [%d0], %f0;
    atom.global.add.f64 %e1, [%d0+8], %e0;
    mov.b32 %r3, 0x3C004000; red.relaxed.gpu.global.add.noftz.f16x2 [%d0+16], %r3;
    red.global.add.u64 [%d0+24], 3;
    add.u32 %r1, %r0, 1;
    atom.global.cas.b32 %r2, [%d1], 0, %r1;
    setp.eq.u32 %p0, %r2, 0;
    @%p0 st.global.u32 [%d1+4], %r0;
    ret;
}"""
    text = text.replace(".reg .f64", ".reg .pred %p<2>; .reg .f64")
    sums, owner = device.upload(np.zeros(4, np.uint64)), device.upload(np.array([0, 99], np.uint32))
    execute(device, text, [pointer(sums), pointer(owner)])
    got = device.download(sums)
    assert got[:1].view(np.float32)[0] == 31 * 16
    assert got[1:2].view(np.float64)[0] == 31 * 16
    assert got[2:3].view(np.float16)[:2].tolist() == [64.0, 32.0]
    assert int(got[3]) == 96
    assert device.download(owner).tolist() == [1, 0]


ASYNC = """
.shared .align 16 .b8 stage[1024];
.visible .entry k(.param .u64 out, .param .u64 src) {{
    .reg .b32 %r<10>; .reg .b64 %d<10>; .reg .pred %p<4>;
    mov.u32 %r0, %tid.x; ld.param.u64 %d0, [src]; mad.wide.u32 %d0, %r0, 16, %d0;
    mov.u32 %r1, stage; mad.lo.u32 %r1, %r0, 16, %r1;
    cp.async.cg.shared.global [%r1], [%d0], 16;
    cp.async.commit_group;
    cp.async.ca.shared.global [%r1+512], [%d0+512], 16, {size};
    cp.async.commit_group;
    {wait}
    ld.shared.u32 %r2, [%r1]; ld.shared.u32 %r3, [%r1+512];
    ld.param.u64 %d1, [out]; mad.wide.u32 %d1, %r0, 8, %d1; st.global.v2.u32 [%d1], {{%r2, %r3}};
    ret;
}}"""


def test_async_copies(device: PtxDevice) -> None:
    data = np.arange(256, dtype=np.uint32) + 100
    source, out = device.upload(data), device.upload(np.zeros((32, 2), np.uint32))
    for wait in ("cp.async.wait_group 0;", "cp.async.wait_all;", "cp.async.wait_group 1; cp.async.wait_group 0;"):
        execute(device, ASYNC.format(size=16, wait=wait), [pointer(out), pointer(source)])
        got = device.download(out)
        assert (got[:, 0] == data[:128:4]).all()
        assert (got[:, 1] == data[128::4]).all()
    # A source size of 0 writes zeros and reads nothing, whatever the address.
    execute(device, ASYNC.format(size=0, wait="cp.async.wait_all;"), [pointer(out), pointer(source)])
    assert (device.download(out)[:, 1] == 0).all()


@pytest.mark.parametrize("wait", ["", "cp.async.wait_group 1;"])
def test_reading_an_async_copy_before_the_wait(device: PtxDevice, wait: str) -> None:
    source, out = device.upload(np.zeros(256, np.uint32)), device.upload(np.zeros((32, 2), np.uint32))
    text = HEADER + ASYNC.format(size=16, wait=wait)
    with pytest.raises(PtxError) as caught:
        execute(device, ASYNC.format(size=16, wait=wait), [pointer(out), pointer(source)])
    assert caught.value.kind == "async-copy-unwaited"
    # With one group waited for, the first load is fine and the second is not.
    assert caught.value.text == ("ld.shared.u32 %r3, [%r1+512]" if wait else "ld.shared.u32 %r2, [%r1]")
    assert caught.value.text in text.splitlines()[caught.value.line - 1]
    assert caught.value.thread == (0, 0, 0)


BULK = """
.shared .align 16 .b8 stage[1024];
.shared .align 8 .b64 signal;
.visible .entry k(.param .u64 out, .param .u64 src) {{
    .reg .b32 %r<10>; .reg .b64 %d<10>; .reg .pred %p<4>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, stage; mov.u32 %r2, signal;
    mov.u32 %r9, %ctaid.x; ld.param.u64 %d0, [src]; mad.wide.u32 %d0, %r9, 1024, %d0;
    setp.ne.u32 %p0, %r0, 0;
    @%p0 bra behind;
    mbarrier.init.shared.b64 [%r2], 1;
    fence.proxy.async.shared::cta;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 1024;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%d0], 1024, [%r2];
behind:
    bar.sync 0;
    {wait}
    mad.lo.u32 %r3, %r0, 16, %r1; ld.shared.v4.u32 {{%r4, %r5, %r6, %r7}}, [%r3];
    add.u32 %r4, %r4, 1; add.u32 %r7, %r7, 1;
    ld.param.u64 %d1, [out]; mad.lo.u32 %r8, %r9, 64, %r0; mad.wide.u32 %d1, %r8, 16, %d1;
    st.global.v4.u32 [%d1], {{%r4, %r5, %r6, %r7}};
    ret;
}}"""
WAIT = """
again:
    mbarrier.try_wait.parity.shared.b64 %p1, [%r2], 0;
    @!%p1 bra again;"""


def test_bulk_copy_with_mbarrier(device: PtxDevice) -> None:
    data = np.arange(3 * 256, dtype=np.uint32)
    source, out = device.upload(data), device.upload(np.zeros_like(data))
    execute(device, BULK.format(wait=WAIT), [pointer(out), pointer(source)], grid=3, block=64)
    want = data.reshape(-1, 4) + np.array([1, 0, 0, 1], np.uint32)
    assert (device.download(out).reshape(-1, 4) == want).all()
    with pytest.raises(PtxError) as caught:
        execute(device, BULK.format(wait=""), [pointer(out), pointer(source)], grid=3, block=64)
    assert caught.value.kind == "async-copy-unwaited"


def test_address_spaces_are_told_apart(device: PtxDevice) -> None:
    """1 global, 2 shared, 4 local; and cvta.to undoes cvta."""
    code = """mov.u64 %d0, box; cvta.shared.u64 %d1, %d0; mov.u64 %d2, depot; cvta.local.u64 %d3, %d2;
    cvta.to.shared.u64 %d4, %d1; setp.eq.u64 %p6, %d4, %d0; mov.u32 {d}, 0;
    setp.lt.u32 %p0, {a}, 10; setp.lt.u32 %p1, {a}, 20; selp.b64 %d5, %d1, %d3, %p1; @%p0 mov.u64 %d5, %d11;
    isspacep.global %p2, %d5; isspacep.shared %p3, %d5; isspacep.local %p4, %d5; isspacep.const %p5, %d5;
    @%p2 add.u32 {d}, {d}, 1; @%p3 add.u32 {d}, {d}, 2; @%p4 add.u32 {d}, {d}, 4; @%p5 add.u32 {d}, {d}, 8;
    @%p6 add.u32 {d}, {d}, 16;"""
    declarations = ".shared .align 8 .b8 box[16];"
    a = np.arange(30, dtype=np.uint32)
    got = run(device, ".local .align 8 .b8 depot[16]; " + code, [a], np.uint32, declarations)
    assert (got == 16 + np.where(a < 10, 1, np.where(a < 20, 2, 4))).all()


def test_generic_accesses_of_one_instruction_go_to_different_spaces(device: PtxDevice) -> None:
    code = """.local .align 8 .b8 depot[16];
    mov.u64 %d0, box; cvta.shared.u64 %d1, %d0; mad.wide.u32 %d1, %i0, 4, %d1;
    mov.u64 %d2, depot; cvta.local.u64 %d3, %d2;
    setp.lt.u32 %p0, {a}, 10; setp.lt.u32 %p1, {a}, 20; selp.b64 %d5, %d1, %d3, %p1; @%p0 mov.u64 %d5, %d11;
    add.u32 %t0, {a}, 1000; st.u32 [%d5], %t0; atom.add.u32 %t1, [%d5], 1; ld.u32 %t2, [%d5]; sub.u32 {d}, %t2, %t1;
    mad.lo.u32 {d}, %t1, 10, {d};"""
    a = np.arange(30, dtype=np.uint32)
    got = run(device, code, [a], np.uint32, ".shared .align 8 .b8 box[128];")
    assert (got == (a + 1000) * 10 + 1).all()


def test_hints_and_special_registers(device: PtxDevice) -> None:
    a = np.arange(70, dtype=np.uint32)
    hints = (
        "prefetch.global.L2 [%d11]; prefetchu.L1 [%d11]; membar.gl; fence.acq_rel.gpu; nanosleep.u32 20; "
        "griddepcontrol.wait; griddepcontrol.launch_dependents; createpolicy.fractional.L2::evict_first.b64 %d1, 1.0; "
        "discard.global.L2 [%d11], 128; applypriority.global.L2::evict_normal [%d11], 128; mov.u32 {d}, {a};"
    )
    assert (run(device, hints, [a], np.uint32) == a).all()
    with pytest.raises(PtxError, match="out-of-bounds"):
        run(device, "prefetch.global.L2 [%d11 + 65536]; mov.u32 {d}, {a};", [a], np.uint32)
    lane = a % 32
    specials = {
        "%tid.x": a,
        "%ntid.x": 70,
        "%ctaid.x": 0,
        "%nctaid.x": 1,
        "%laneid": lane,
        "%warpid": a // 32,
        "%nwarpid": 3,
        "%lanemask_eq": 1 << lane,
        "%lanemask_lt": (1 << lane) - 1,
        "%lanemask_le": (2 << lane.astype(np.uint64)) - 1,
        "%lanemask_gt": 0xFFFFFFFF ^ ((2 << lane.astype(np.uint64)) - 1),
        "%lanemask_ge": 0xFFFFFFFF ^ ((1 << lane.astype(np.uint64)) - 1),
    }
    for name, want in specials.items():
        assert (run(device, f"mov.u32 {{d}}, {name};", [a], np.uint32) == want).all(), name
    clocks = run(device, "mov.u32 %t0, %clock; mov.u32 %t1, %clock; sub.u32 {d}, %t1, %t0;", [a], np.uint32)
    assert (clocks > 0).all()


def test_thread_and_block_indices_in_three_dimensions(device: PtxDevice) -> None:
    text = """
.visible .entry k(.param .u64 out) {
    .reg .b32 %r<20>; .reg .b64 %d<4>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, %tid.y; mov.u32 %r2, %tid.z;
    mov.u32 %r3, %ntid.x; mov.u32 %r4, %ntid.y; mov.u32 %r5, %ntid.z;
    mov.u32 %r6, %ctaid.x; mov.u32 %r7, %ctaid.y; mov.u32 %r8, %ctaid.z;
    mov.u32 %r9, %nctaid.x; mov.u32 %r10, %nctaid.y;
    mad.lo.u32 %r11, %r2, %r4, %r1; mad.lo.u32 %r11, %r11, %r3, %r0;
    mad.lo.u32 %r12, %r8, %r10, %r7; mad.lo.u32 %r12, %r12, %r9, %r6;
    mul.lo.u32 %r13, %r3, %r4; mul.lo.u32 %r13, %r13, %r5; mad.lo.u32 %r14, %r12, %r13, %r11;
    ld.param.u64 %d0, [out]; mad.wide.u32 %d0, %r14, 4, %d0;
    mul.lo.u32 %r15, %r6, 100; add.u32 %r15, %r15, %r0;
    mad.lo.u32 %r15, %r7, 10000, %r15; mad.lo.u32 %r15, %r1, 10, %r15;
    st.global.u32 [%d0], %r15;
    ret;
}"""
    grid, block = (3, 2, 2), (5, 3, 2)
    out = device.upload(np.zeros((*grid[::-1], *block[::-1]), np.uint32))
    execute(device, text, [pointer(out)], grid=grid, block=block)
    z, y, x, tz, ty, tx = np.indices((*grid[::-1], *block[::-1]))
    del z, tz
    assert (device.download(out) == x * 100 + tx + y * 10000 + ty * 10).all()
