"""Counters on access patterns whose numbers can be told in advance."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numba_engine.backends.ptx import LaunchCounters, PtxDevice
from tests.ptx.snippets import HEADER

WARPS = 3
LANES = 32 * WARPS


def count(device: PtxDevice, text: str, arguments: list[Any], **options: Any) -> LaunchCounters:
    device.execute(device.load(HEADER + text, name="k"), options.pop("grid", 1), options.pop("block", LANES), arguments)
    return device.launches[-1]


READ = """
.visible .entry k(.param .u64 out, .param .u64 src) {{
    .reg .b32 %r<8>; .reg .b64 %d<8>;
    mov.u32 %r0, %tid.x; {index}
    ld.param.u64 %d0, [src]; mad.wide.u32 %d0, %r1, {size}, %d0;
    ld.global.{kind} {registers}, [%d0{offset}];
    ld.param.u64 %d1, [out]; mad.wide.u32 %d1, %r0, 4, %d1; st.global.u32 [%d1], %r2;
    ret;
}}"""

PATTERNS = [
    # index, element size, offset, kind, registers; sectors and ideal of a warp, bytes of a lane
    ("mov.u32 %r1, %r0;", 4, "", "u32", "%r2", 4, 4, 4),
    ("mov.u32 %r1, %r0;", 4, "+4", "u32", "%r2", 5, 4, 4),
    ("mul.lo.u32 %r1, %r0, 8;", 4, "", "u32", "%r2", 32, 4, 4),
    ("mul.lo.u32 %r1, %r0, 2;", 4, "", "u32", "%r2", 8, 4, 4),
    ("mov.u32 %r1, 5;", 4, "", "u32", "%r2", 1, 1, 4),
    ("xor.b32 %r1, %r0, 31;", 4, "", "u32", "%r2", 4, 4, 4),
    ("mov.u32 %r1, %r0;", 16, "", "v4.u32", "{%r2, %r3, %r4, %r5}", 16, 16, 16),
    ("mul.lo.u32 %r1, %r0, 2;", 16, "", "v4.u32", "{%r2, %r3, %r4, %r5}", 32, 16, 16),
    ("mov.u32 %r1, %r0;", 8, "", "v2.u32", "{%r2, %r3}", 8, 8, 8),
    ("mov.u32 %r1, %r0;", 1, "", "u8", "%r2", 1, 1, 1),
    ("mov.u32 %r1, %r0;", 2, "", "u16", "%r2", 2, 2, 2),
    ("and.b32 %r1, %r0, 1; mul.lo.u32 %r1, %r1, 100;", 4, "", "u32", "%r2", 2, 1, 4),
]


@pytest.mark.parametrize(("index", "size", "offset", "kind", "registers", "sectors", "ideal", "width"), PATTERNS)
def test_global_loads(
    counting_device: PtxDevice,
    index: str,
    size: int,
    offset: str,
    kind: str,
    registers: str,
    sectors: int,
    ideal: int,
    width: int,
) -> None:
    device = counting_device
    source, out = device.upload(np.zeros(4096, np.uint32), "source"), device.empty((LANES,), np.uint32, "out")
    text = READ.format(index=index, size=size, offset=offset, kind=kind, registers=registers)
    counters = count(device, text, [out.pointer, source.pointer])
    load = counters.arrays["source"].load
    assert load.requests == WARPS
    assert load.sectors == WARPS * sectors
    assert load.sectors_ideal == WARPS * ideal
    assert load.bytes == LANES * width
    assert load.bytes_by_width == {width: LANES * width}
    store = counters.arrays["out"].store
    assert (store.requests, store.sectors, store.bytes) == (WARPS, 4 * WARPS, 4 * LANES)
    assert counters.arrays["source"].store.bytes == 0


def test_how_often_each_byte_is_read(counting_device: PtxDevice) -> None:
    device = counting_device
    source, out = device.upload(np.zeros(4096, np.uint32), "source"), device.empty((LANES,), np.uint32, "out")
    text = READ.format(index="shr.u32 %r1, %r0, 2;", size=4, offset="", kind="u32", registers="%r2")
    for _ in range(2):
        # A second launch counts afresh.
        array = count(device, text, [out.pointer, source.pointer]).arrays["source"]
        assert array.max_reads_per_byte == 4
        assert array.distinct_bytes_read == LANES // 4 * 4
        assert array.distinct_sectors == LANES // 4 * 4 // 32
    assert device.launches[-1].dram_ideal_bytes == 96 + 4 * LANES


def test_arrays_of_one_name_are_told_apart(counting_device: PtxDevice) -> None:
    device = counting_device
    source, out = device.upload(np.zeros(LANES, np.uint32), "same"), device.empty((LANES,), np.uint32, "same")
    text = READ.format(index="mov.u32 %r1, %r0;", size=4, offset="", kind="u32", registers="%r2")
    arrays = count(device, text, [out.pointer, source.pointer]).arrays
    assert {name: (array.load.bytes, array.store.bytes) for name, array in arrays.items()} == {
        "same": (4 * LANES, 0),
        "same #2": (0, 4 * LANES),
    }


def test_a_uniform_load_counts_for_every_warp(counting_device: PtxDevice) -> None:
    """The executor loads it once; the hardware would not."""
    device = counting_device
    source, out = device.upload(np.zeros(64, np.uint32), "source"), device.empty((LANES,), np.uint32, "out")
    text = READ.format(index="mov.u32 %r1, 3;", size=4, offset="", kind="u32", registers="%r2")
    load = count(device, text, [out.pointer, source.pointer], grid=5).arrays["source"].load
    assert (load.requests, load.sectors, load.bytes) == (5 * WARPS, 5 * WARPS, 5 * LANES * 4)


SHARED = """
.shared .align 16 .b8 box[16384];
.visible .entry k() {{
    .reg .b32 %r<8>; .reg .b64 %d<8>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, box; {index} mad.lo.u32 %r1, %r2, {size}, %r1;
    st.shared.{kind} [%r1], {registers};
    ret;
}}"""


@pytest.mark.parametrize("stride", [1, 2, 4, 8, 16, 32, 3, 33])
def test_bank_conflicts_of_words(counting_device: PtxDevice, stride: int) -> None:
    """A stride of s words is a gcd(s, 32)-way conflict."""
    text = SHARED.format(index=f"mul.lo.u32 %r2, %r0, {stride};", size=4, kind="u32", registers="%r0")
    counters = count(counting_device, text, [], block=32)
    assert counters.shared_requests == 1
    assert counters.shared_wavefronts == np.gcd(stride, 32)
    assert counters.shared_wavefronts_ideal == 1
    assert counters.shared_access_bytes == 128
    assert counters.bank_conflict_factor == np.gcd(stride, 32)


@pytest.mark.parametrize(
    ("index", "size", "kind", "registers", "wavefronts", "ideal"),
    [
        ("mov.u32 %r2, %r0;", 8, "v2.u32", "{%r0, %r0}", 2, 2),
        ("mul.lo.u32 %r2, %r0, 2;", 8, "v2.u32", "{%r0, %r0}", 4, 2),
        ("mov.u32 %r2, %r0;", 16, "v4.u32", "{%r0, %r0, %r0, %r0}", 4, 4),
        ("mul.lo.u32 %r2, %r0, 8;", 16, "v4.u32", "{%r0, %r0, %r0, %r0}", 32, 4),
        ("xor.b32 %r2, %r0, 5;", 16, "v4.u32", "{%r0, %r0, %r0, %r0}", 4, 4),
        ("mov.u32 %r2, %r0;", 1, "u8", "%r0", 1, 1),
        ("mov.u32 %r2, %r0;", 2, "u16", "%r0", 1, 1),
    ],
)
def test_bank_conflicts_of_other_widths(
    counting_device: PtxDevice, index: str, size: int, kind: str, registers: str, wavefronts: int, ideal: int
) -> None:
    text = SHARED.format(index=index, size=size, kind=kind, registers=registers)
    counters = count(counting_device, text, [], block=32)
    assert (counters.shared_wavefronts, counters.shared_wavefronts_ideal) == (wavefronts, ideal)


def test_broadcast_of_a_shared_word_is_one_wavefront(counting_device: PtxDevice) -> None:
    text = """
.shared .align 16 .b8 box[256];
.visible .entry k() {
    .reg .b32 %r<8>; .reg .pred %p<2>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, box; mad.lo.u32 %r2, %r0, 4, %r1; st.shared.u32 [%r2], %r0; bar.sync 0;
    ld.shared.u32 %r3, [box]; shr.u32 %r4, %r0, 4; mad.lo.u32 %r4, %r4, 4, %r1; ld.shared.u32 %r5, [%r4];
    ret;
}"""
    counters = count(counting_device, text, [], block=64)
    assert (counters.shared_requests, counters.shared_wavefronts) == (6, 6)


def test_instructions_by_class(counting_device: PtxDevice) -> None:
    text = """
.visible .entry k(.param .u64 out) {
    .reg .b32 %r<8>; .reg .f32 %f<4>; .reg .b64 %d<4>; .reg .pred %p<2>;
    ld.param.u64 %d0, [out]; mov.u32 %r0, %tid.x; mov.u32 %r1, 0;
loop:
    add.u32 %r1, %r1, 1; setp.lt.u32 %p0, %r1, 10; @%p0 bra loop;
    setp.ge.u32 %p1, %r0, 32; @%p1 bra end;
    cvt.rn.f32.u32 %f0, %r1; sqrt.rn.f32 %f1, %f0; st.global.f32 [%d0], %f1;
end:
    ret;
}"""
    out = counting_device.empty((1,), np.float32, "out")
    counters = count(counting_device, text, [out.pointer], block=80)
    assert counters.warp_instructions_by_class == {
        "load param": 3,
        "move": 6,
        "arithmetic": 30,
        "comparison": 33,
        "control": 30 + 3 + 3,
        "conversion": 1,
        "special function": 1,
        "store global": 1,
    }
    assert counters.warp_instructions == 111
    assert counters.lane_instructions == 80 * (3 + 30 + 2 + 1) + 32 * 3
    assert (counters.grid, counters.block, counters.kernel) == ((1, 1, 1), (80, 1, 1), "k")
    assert counters.as_dict()["arrays"]["out"]["store"]["bytes"] == 4 * 32
