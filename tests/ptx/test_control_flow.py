"""Divergence, loops, calls, indexed branches and barriers, from hand-written PTX."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends.ptx import Checks, PtxDevice, PtxError
from tests.ptx.snippets import run
from tests.ptx.test_opcodes_memory import execute, pointer

A = np.random.default_rng(0).integers(0, 50, 200).astype(np.uint32)


def test_divergent_loops_reconverge(device: PtxDevice) -> None:
    """Each lane loops as often as its value says, with an inner branch; behind the loop all meet."""
    code = """mov.u32 {d}, 0; mov.u32 %t0, 0;
loop:
    setp.ge.u32 %p0, %t0, {a}; @%p0 bra done;
    and.b32 %t1, %t0, 1; setp.eq.u32 %p1, %t1, 0; @%p1 bra even;
    add.u32 {d}, {d}, 3; bra next;
even:
    add.u32 {d}, {d}, %t0;
next:
    add.u32 %t0, %t0, 1; bra.uni loop;
done:
    add.u32 {d}, {d}, 1000;"""
    want = [sum(3 if i % 2 else i for i in range(n)) + 1000 for n in A.tolist()]
    assert run(device, code, [A], np.uint32).tolist() == want


def test_value_of_a_divergent_loop_counter_behind_the_loop(device: PtxDevice) -> None:
    """The counter is the same in all lanes while they loop, and differs once they have left."""
    code = """mov.u32 %t0, 0;
loop: add.u32 %t0, %t0, 2; setp.lt.u32 %p0, %t0, {a}; @%p0 bra loop;
    mov.u32 {d}, %t0;"""
    assert run(device, code, [A], np.uint32).tolist() == [max(2, n + n % 2) for n in A.tolist()]


def test_lanes_that_continue_early_wait_for_the_others(device: PtxDevice) -> None:
    """Two ways back to the head of the loop; the counter is the same in all lanes and must be counted once."""
    code = """mov.u32 %t0, 0; mov.u32 {d}, 0;
head: add.u32 %t0, %t0, 1; setp.gt.u32 %p0, %t0, 10; @%p0 bra done;
    add.u32 {d}, {d}, %t0; setp.lt.u32 %p1, {a}, 25; @%p1 bra head;
    add.u32 {d}, {d}, 100; bra head;
done:"""
    assert run(device, code, [A], np.uint32).tolist() == [55 if n < 25 else 1055 for n in A.tolist()]


def test_inner_loop_left_to_the_head_of_the_outer_one(device: PtxDevice) -> None:
    """for i in 1…5: for j in 1…: if j == a % 4 + 1: continue outer; sum += i * j."""
    code = """mov.u32 %t0, 0; mov.u32 {d}, 0; and.b32 %t2, {a}, 3; add.u32 %t2, %t2, 1;
outer: add.u32 %t0, %t0, 1; setp.gt.u32 %p0, %t0, 5; @%p0 bra done;
    mov.u32 %t1, 0;
inner: add.u32 %t1, %t1, 1; setp.eq.u32 %p1, %t1, %t2; @%p1 bra outer;
    mad.lo.u32 {d}, %t0, %t1, {d}; bra inner;
done:"""
    want = [15 * sum(range(1, n % 4 + 1)) for n in A.tolist()]
    assert run(device, code, [A], np.uint32).tolist() == want


def test_a_value_waits_behind_the_loop_while_others_loop_on(device: PtxDevice) -> None:
    """%t2 is computed last in a round and read behind the loop; no temporary of a later round may take its place."""
    code = """mov.u32 %t0, 0; mov.u32 %t3, 0;
head: mul.lo.u32 %t1, %t0, {a}; add.u32 %t3, %t3, %t1; add.u32 %t0, %t0, 1;
    add.u32 %t2, %t3, 5; setp.lt.u32 %p0, %t0, {a}; @%p0 bra head;
    add.u32 {d}, %t2, %t3;"""
    want = [2 * sum(i * n for i in range(max(n, 1))) + 5 for n in A.tolist()]
    assert run(device, code, [A], np.uint32).tolist() == want


def test_irreducible_loop(device: PtxDevice) -> None:
    """Odd lanes jump into the middle of the loop."""
    code = """mov.u32 %t0, 0; mov.u32 {d}, 0; and.b32 %t1, {a}, 1; setp.eq.u32 %p0, %t1, 1; @%p0 bra middle;
top: add.u32 {d}, {d}, 1;
middle: add.u32 %t0, %t0, 1; add.u32 {d}, {d}, 10; setp.lt.u32 %p1, %t0, 5; @%p1 bra top;
done:"""
    assert run(device, code, [A], np.uint32).tolist() == [54 if n % 2 else 55 for n in A.tolist()]


def test_loop_left_through_a_break_and_an_early_exit(device: PtxDevice) -> None:
    text = """
.visible .entry k(.param .u64 out, .param .u64 src, .param .u32 n) {
    .reg .b32 %r<10>; .reg .b64 %d<6>; .reg .pred %p<6>;
    mov.u32 %r0, %tid.x; mov.u32 %r9, %ctaid.x; mad.lo.u32 %r0, %r9, 48, %r0;
    ld.param.u32 %r1, [n]; setp.ge.u32 %p0, %r0, %r1; @%p0 ret;
    ld.param.u64 %d0, [src]; mad.wide.u32 %d0, %r0, 4, %d0; ld.global.u32 %r2, [%d0];
    mov.u32 %r3, 0; mov.u32 %r4, 1;
loop:
    add.u32 %r3, %r3, %r4;
    setp.gt.u32 %p1, %r3, %r2; @%p1 bra broke;
    add.u32 %r4, %r4, 1; setp.lt.u32 %p2, %r4, 8; @%p2 bra loop;
    add.u32 %r3, %r3, 500;
broke:
    ld.param.u64 %d1, [out]; mad.wide.u32 %d1, %r0, 4, %d1; st.global.u32 [%d1], %r3;
    setp.eq.u32 %p3, %r2, 7; @%p3 exit;
    add.u32 %r3, %r3, 1; st.global.u32 [%d1], %r3;
    ret;
}"""
    n = 130
    out = device.upload(np.zeros(200, np.uint32))
    source = device.upload(A)
    execute(device, text, [pointer(out), pointer(source), n], grid=4, block=48)

    def one(limit: int) -> int:
        total = 0
        for step in range(1, 8):
            total += step
            if total > limit:
                break
        else:
            total += 500
        return total if limit == 7 else total + 1

    assert device.download(out).tolist() == [one(v) for v in A[:n].tolist()] + [0] * 70


def test_calls_are_inlined_with_their_parameters(device: PtxDevice) -> None:
    declarations = """
.func (.param .b32 result) twice(.param .b32 x)
{ .reg .b32 %r<3>; .reg .pred %p1;
  ld.param.b32 %r1, [x]; setp.gt.u32 %p1, %r1, 25; @%p1 bra big;
  add.u32 %r2, %r1, %r1; st.param.b32 [result], %r2; ret;
big: st.param.b32 [result], 7; ret; }
.func (.param .align 8 .b8 result[16]) pair(.param .align 8 .b8 x[16])
{ .reg .b32 %r<5>;
  ld.param.b32 %r1, [x+4]; ld.param.b32 %r2, [x+8];
  { .param .b32 p0; st.param.b32 [p0], %r1; .param .b32 r0; call.uni (r0), twice, (p0); ld.param.b32 %r3, [r0]; }
  st.param.b32 [result], %r3; st.param.b32 [result+12], %r2; ret; }
"""
    code = """{{ .param .align 8 .b8 p0[16]; .param .align 8 .b8 r0[16];
    st.param.b32 [p0+4], {a}; st.param.b32 [p0+8], 11;
    call (r0), pair, (p0);
    ld.param.b32 %t0, [r0]; ld.param.b32 %t1, [r0+12]; }}
    mad.lo.u32 {d}, %t0, 100, %t1;
    setp.lt.u32 %p0, {a}, 10;
    {{ .param .b32 p0; .param .b32 r0; st.param.b32 [p0], 4;
    @%p0 call (r0), twice, (p0); ld.param.b32 %t0, [r0]; }}
    @%p0 add.u32 {d}, {d}, %t0;"""
    want = [(7 if n > 25 else 2 * n) * 100 + 11 + (8 if n < 10 else 0) for n in A.tolist()]
    assert run(device, code, [A], np.uint32, declarations).tolist() == want


def test_indexed_branch(device: PtxDevice) -> None:
    code = """rem.u32 %t0, {a}, 3;
targets: .branchtargets zero, one, two;
    brx.idx %t0, targets;
zero: mov.u32 {d}, 100; bra end;
one: mov.u32 {d}, 200; bra end;
two: mov.u32 {d}, 300;
end:"""
    assert (run(device, code, [A], np.uint32) == (A % 3 + 1) * 100).all()


def test_inline_assembly_scopes_have_their_own_names(device: PtxDevice) -> None:
    code = """// begin inline asm
    {{ .reg .pred p; .reg .b32 t; add.u32 t, {a}, 1; setp.gt.u32 p, t, 20; @p bra skip;
    mov.u32 {d}, 1; bra end; skip: mov.u32 {d}, 2; end: }}
    // end inline asm
    {{ .reg .pred p; .reg .b32 t<2>; setp.gt.u32 p, {a}, 40; @!p bra skip;
    add.u32 t1, {d}, 10; mov.u32 {d}, t1; skip: }}"""
    want = [(2 if n + 1 > 20 else 1) + (10 if n > 40 else 0) for n in A.tolist()]
    assert run(device, code, [A], np.uint32).tolist() == want


def test_recursion_and_missing_functions_are_named(device: PtxDevice) -> None:
    recursive = ".func f() { call f; ret; }"
    with pytest.raises(PtxError, match="deeper than") as caught:
        run(device, "call f; mov.u32 {d}, 0;", [A], np.uint32, recursive)
    assert caught.value.kind == "unsupported"
    with pytest.raises(PtxError, match="no body for function g"):
        run(device, "call g; mov.u32 {d}, 0;", [A], np.uint32, ".extern .func g();")


NAMED = """
.shared .align 4 .b8 box[256];
.visible .entry k(.param .u64 out) {
    .reg .b32 %r<10>; .reg .b64 %d<4>; .reg .pred %p<3>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, box; mov.u32 %r7, %ctaid.x;
    setp.ge.u32 %p0, %r0, 32; @%p0 bra consumer;
    mul.lo.u32 %r2, %r0, 4; add.u32 %r2, %r1, %r2; mad.lo.u32 %r3, %r7, 10, %r0; st.shared.u32 [%r2], %r3;
    barrier.cta.arrive 1, 64;
    bra end;
consumer:
    bar.sync 1, 64;
    sub.u32 %r4, 63, %r0; mul.lo.u32 %r2, %r4, 4; add.u32 %r2, %r1, %r2; ld.shared.u32 %r5, [%r2];
    mad.lo.u32 %r6, %r7, 32, %r4; ld.param.u64 %d0, [out]; mad.wide.u32 %d0, %r6, 4, %d0; st.global.u32 [%d0], %r5;
end:
    ret;
}"""


def test_named_barrier_between_a_producer_and_a_consumer_warp(device: PtxDevice) -> None:
    out = device.upload(np.zeros((3, 32), np.uint32))
    execute(device, NAMED, [pointer(out)], grid=3, block=64)
    assert (device.download(out) == np.arange(3)[:, None] * 10 + np.arange(32)).all()


def test_barriers_in_loops_of_different_length_per_block(device: PtxDevice) -> None:
    """Block b loops b + 1 times over a barrier; the running sum passes through shared memory."""
    text = """
.shared .align 4 .b8 box[256];
.visible .entry k(.param .u64 out) {
    .reg .b32 %r<12>; .reg .b64 %d<4>; .reg .pred %p<3>;
    mov.u32 %r0, %tid.x; mov.u32 %r7, %ctaid.x; mov.u32 %r1, box; mad.lo.u32 %r2, %r0, 4, %r1;
    xor.b32 %r3, %r0, 1; mad.lo.u32 %r3, %r3, 4, %r1; mov.u32 %r4, %r0; mov.u32 %r5, 0;
loop:
    st.shared.u32 [%r2], %r4; bar.sync 0; ld.shared.u32 %r6, [%r3]; bar.sync 0;
    add.u32 %r4, %r6, 1; add.u32 %r5, %r5, 1; setp.le.u32 %p0, %r5, %r7; @%p0 bra loop;
    mad.lo.u32 %r8, %r7, 64, %r0; ld.param.u64 %d0, [out]; mad.wide.u32 %d0, %r8, 4, %d0; st.global.u32 [%d0], %r4;
    ret;
}"""
    out = device.upload(np.zeros((9, 64), np.uint32))
    execute(device, text, [pointer(out)], grid=9, block=64)
    rounds = np.arange(1, 10)[:, None]
    lane = np.arange(64)
    assert (device.download(out) == np.where(rounds % 2, lane ^ 1, lane) + rounds).all()


def test_barrier_reductions(device: PtxDevice) -> None:
    for operation, want in (("popc.u32", np.count_nonzero(A[:96] > 25)), ("and.pred", 0), ("or.pred", 1)):
        target = "{d}" if operation == "popc.u32" else "%p1"
        after = "" if operation == "popc.u32" else "selp.u32 {d}, 1, 0, %p1;"
        code = f"setp.gt.u32 %p0, {{a}}, 25; barrier.cta.red.{operation} {target}, 0, %p0; {after}"
        assert (run(device, code, [A[:96]], np.uint32) == want).all(), operation


GRID_BARRIER = """
.visible .entry k(.param .u64 counter, .param .u64 data, .param .u64 out) {
    .reg .b32 %r<12>; .reg .b64 %d<8>; .reg .pred %p<3>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mov.u32 %r2, %nctaid.x;
    ld.param.u64 %d0, [counter]; ld.param.u64 %d1, [data]; mad.wide.u32 %d2, %r1, 4, %d1;
    setp.ne.u32 %p0, %r0, 0; @%p0 bra wait_here;
    add.u32 %r3, %r1, 5; st.global.u32 [%d2], %r3;
    fence.acq_rel.gpu; red.release.gpu.global.add.u32 [%d0], 1;
spin:
    ld.acquire.gpu.global.u32 %r4, [%d0]; setp.lt.u32 %p1, %r4, %r2; @%p1 bra spin;
wait_here:
    bar.sync 0;
    sub.u32 %r5, %r2, %r1; sub.u32 %r5, %r5, 1; mad.wide.u32 %d3, %r5, 4, %d1; ld.global.u32 %r6, [%d3];
    mad.lo.u32 %r7, %r1, 32, %r0; ld.param.u64 %d4, [out]; mad.wide.u32 %d4, %r7, 4, %d4; st.global.u32 [%d4], %r6;
    ret;
}"""


def test_grid_barrier_needs_all_blocks_resident() -> None:
    device = PtxDevice(memory_bytes=1 << 24, lanes=64, checks=Checks(step_limit=5000))
    blocks = 11
    arrays = [device.upload(np.zeros(n, np.uint32)) for n in (1, blocks, blocks * 32)]
    execute(device, GRID_BARRIER, list(map(pointer, arrays)), grid=blocks, cooperative=True)
    want = np.repeat(np.arange(blocks)[::-1] + 5, 32)
    assert (device.download(arrays[2]) == want).all()
    device.write(arrays[0], np.zeros(1, np.uint32))
    with pytest.raises(PtxError, match="cooperative=True") as caught:
        execute(device, GRID_BARRIER, list(map(pointer, arrays)), grid=blocks)
    assert caught.value.kind == "step-limit"


def test_blocks_that_wait_for_their_predecessor(device: PtxDevice) -> None:
    """A chain: block b spins until block b - 1 has published its sum. Waiting lanes must let the others go on."""
    text = """
.visible .entry k(.param .u64 chain) {
    .reg .b32 %r<12>; .reg .b64 %d<8>; .reg .pred %p<3>;
    mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; ld.param.u64 %d0, [chain]; mad.wide.u32 %d1, %r1, 4, %d0;
    setp.ne.u32 %p0, %r0, 0; @%p0 bra wait_here;
spin:
    ld.acquire.gpu.global.u32 %r4, [%d1]; setp.eq.u32 %p1, %r4, 0; @%p1 bra spin;
    add.u32 %r5, %r4, %r1;
    bra publish;
publish:
    st.release.gpu.global.u32 [%d1+4], %r5;
wait_here:
    bar.sync 0;
    ret;
}"""
    chain = device.upload(np.array([1] + [0] * 7, np.uint32))
    execute(device, text, [pointer(chain)], grid=7, block=64, cooperative=True)
    assert device.download(chain).tolist() == [1, 1, 2, 4, 7, 11, 16, 22]
