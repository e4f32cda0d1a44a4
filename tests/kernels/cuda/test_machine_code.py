"""What is read from machine code: which line an instruction came from, its unit, and what is in flight."""

from __future__ import annotations

from typing import Any

import pytest
from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.cuda.compiler import CompiledKernel, Kernel, compile_kernel
from numba_engine.backends.cuda.kernels.intrinsics import load_weights
from numba_engine.backends.cuda.ptxas import find_ptxas
from numba_engine.kernel_lab.machine_code import MEMORY, SPECIAL, TENSOR, executed, machine_code

pytestmark = pytest.mark.skipif(find_ptxas() is None, reason="ptxas (pip install nvidia-cuda-nvcc) was not found")

CCS = pytest.mark.parametrize("cc", [(8, 0), (8, 9), (9, 0), (10, 0)], ids=lambda cc: ".".join(map(str, cc)))

_HEAD = """.version 8.7
.target sm_{sm}
.address_size 64
.visible .entry k(.param .u64 data, .param .u32 n) {{
.reg .b32 %r<99>; .reg .b64 %rd<9>; .reg .f32 %f<9>; .reg .pred %p<9>;
.shared .align 16 .b8 tile[8192];
ld.param.u64 %rd1, [data];
"""


def assembled(body: str, cc: tuple[int, int]) -> CompiledKernel:
    text = _HEAD.format(sm=f"{cc[0]}{cc[1]}") + body + "ret;\n}\n"
    return CompiledKernel("k", cc, text, "k")


def bytes_in_flight(compiled: CompiledKernel) -> float:
    """Of a warp, if every line runs once."""
    lines = range(1, compiled.ptx.count("\n") + 1)
    return executed(machine_code(compiled), dict.fromkeys(lines, 1)).bytes_in_flight


def quad_loads(count: int, *, waiting: bool) -> str:
    """Loads of 16 bytes a lane; ``waiting``: each is used, and the next address depends on it."""
    text = ""
    for i in range(count):
        text += f"ld.global.v4.u32 {{%r{4 * i},%r{4 * i + 1},%r{4 * i + 2},%r{4 * i + 3}}}, [%rd1+{4096 * i}];\n"
        if waiting:
            text += f"cvt.u64.u32 %rd2, %r{4 * i};\nadd.s64 %rd1, %rd1, %rd2;\n"
    sums = "".join(f"xor.b32 %r90, %r90, %r{i};\n" for i in range(4 * count))
    return f"mov.u32 %r90, 0;\n{text}{sums}st.global.u32 [%rd1], %r90;\n"


@CCS
def test_loads_before_their_first_use_are_in_flight_together(cc: tuple[int, int]) -> None:
    assert bytes_in_flight(assembled(quad_loads(6, waiting=False), cc)) == 6 * 16 * 32


@CCS
def test_loads_whose_address_waits_are_in_flight_alone(cc: tuple[int, int]) -> None:
    assert bytes_in_flight(assembled(quad_loads(6, waiting=True), cc)) == 16 * 32


@CCS
def test_what_a_loop_loads_for_its_next_iteration_is_in_flight(cc: tuple[int, int]) -> None:
    """A is loaded at the end of an iteration and used in the next, after B was asked for."""
    body = """ld.param.u32 %r50, [n];
mov.u32 %r90, 0; mov.u32 %r0, 0; mov.u32 %r1, 0; mov.u32 %r2, 0; mov.u32 %r3, 0;
again:
ld.global.v4.u32 {%r4,%r5,%r6,%r7}, [%rd1];
xor.b32 %r90, %r90, %r0; xor.b32 %r90, %r90, %r1; xor.b32 %r90, %r90, %r2; xor.b32 %r90, %r90, %r3;
xor.b32 %r90, %r90, %r4; xor.b32 %r90, %r90, %r5; xor.b32 %r90, %r90, %r6; xor.b32 %r90, %r90, %r7;
ld.global.v4.u32 {%r0,%r1,%r2,%r3}, [%rd1+65536];
add.s64 %rd1, %rd1, 4096;
sub.u32 %r50, %r50, 1;
setp.ne.u32 %p1, %r50, 0;
.pragma "nounroll";
@%p1 bra again;
xor.b32 %r90, %r90, %r0; xor.b32 %r90, %r90, %r1; xor.b32 %r90, %r90, %r2; xor.b32 %r90, %r90, %r3;
st.global.u32 [%rd1], %r90;
"""
    assert bytes_in_flight(assembled(body.replace("ld.global", "ld.volatile.global"), cc)) == 2 * 16 * 32


@CCS
@pytest.mark.parametrize("younger", [0, 1, 2])
def test_copies_to_shared_memory_are_in_flight_until_their_group_is_waited_for(
    cc: tuple[int, int], younger: int
) -> None:
    """A group is one copy of 16 bytes; ``wait_group n`` leaves n of them."""
    body = "mov.u32 %r1, tile;\n"
    for i in range(6):
        body += f"cp.async.cg.shared.global [%r1+{16 * i}], [%rd1+{16 * i}], 16;\ncp.async.commit_group;\n"
        if i >= younger:
            body += f"cp.async.wait_group {younger};\n"
    compiled = assembled(body + "ld.shared.u32 %r2, [%r1];\nst.global.u32 [%rd1], %r2;\n", cc)
    assert bytes_in_flight(compiled) == (younger + 1) * 16 * 32


@CCS
def test_instructions_count_as_often_as_their_line_ran(cc: tuple[int, int]) -> None:
    body = """ld.global.f32 %f1, [%rd1];
sin.approx.f32 %f2, %f1;
ex2.approx.f32 %f3, %f2;
st.global.f32 [%rd1], %f3;
"""
    compiled = assembled(body, cc)
    lines = dict(enumerate(compiled.ptx.split("\n"), 1))
    by_pipe = executed(machine_code(compiled), {number: 7 for number, line in lines.items() if "ex2" in line}).by_pipe
    assert by_pipe[SPECIAL] == 7
    assert MEMORY not in by_pipe
    memory = executed(machine_code(compiled), {number: 5 for number, line in lines.items() if "global" in line})
    assert memory.by_pipe[MEMORY] >= 10


@CCS
def test_a_loop_that_ptxas_unrolls_is_counted_as_often_as_it_ran(cc: tuple[int, int]) -> None:
    """1000 iterations of a load and five other instructions, and what unrolling adds, however many copies there are."""
    body = """ld.param.u32 %r50, [n];
mov.u32 %r90, 0;
again:
ld.volatile.global.u32 %r4, [%rd1];
xor.b32 %r90, %r90, %r4;
add.s64 %rd1, %rd1, 4096;
sub.u32 %r50, %r50, 1;
setp.ne.u32 %p1, %r50, 0;
@%p1 bra again;
st.global.u32 [%rd1], %r90;
"""
    compiled = assembled(body, cc)
    loop = [number for number, line in enumerate(compiled.ptx.split("\n"), 1) if "again" in line]
    code = machine_code(compiled)
    assert sum(instruction.load_bytes > 0 for instruction in code) > 1, "it is unrolled"
    done = executed(code, dict.fromkeys(range(loop[0], loop[1] + 1), 1000))
    assert done.by_pipe[MEMORY] == pytest.approx(1000)
    assert 3000 < done.instructions < 15000


@CCS
def test_tensor_instructions(cc: tuple[int, int]) -> None:
    body = quad_loads(4, waiting=False).replace("st.global", "//") + (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1,%f2,%f3,%f4}, {%r0,%r1,%r2,%r3}, {%r4,%r5},"
        " {%f1,%f2,%f3,%f4};\nst.global.f32 [%rd1], %f1;\n"
    )
    body = "mov.f32 %f1, 0f00000000;\nmov.f32 %f2, %f1;\nmov.f32 %f3, %f1;\nmov.f32 %f4, %f1;\n" + body
    compiled = assembled(body, cc)
    lines = dict.fromkeys(range(1, compiled.ptx.count("\n") + 1), 3)
    assert executed(machine_code(compiled), lines).by_pipe[TENSOR] == 3


def test_a_compiled_kernel_has_a_line_for_nearly_every_instruction() -> None:
    def kernel(out: Any, data: Any) -> None:
        place = uint32(cuda.threadIdx.x)
        quad = load_weights(data, uint32(place * uint32(4)))
        out[place] = float32(quad[0] ^ quad[1]) + float32(quad[2] ^ quad[3])

    compiled = compile_kernel(Kernel("two_of_four", kernel, (float32[::1], uint32[::1]), 64), (9, 0))
    code = machine_code(compiled)
    lines = compiled.ptx.split("\n")
    loads = [instruction for instruction in code if instruction.load_bytes]
    assert [load.load_bytes for load in loads] == [16]
    assert "ld.global.nc" in lines[loads[0].line - 1]
    assert sum(0 < instruction.line <= len(lines) for instruction in code) == len(code)
