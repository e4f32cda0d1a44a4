"""Each mistake a GPU hides is caught: the kind, the kernel, the block, the thread, the Python line."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")
pytest.importorskip("cuda.bindings", reason="the CUDA compiler libraries are not installed")

from numba.cuda.types import int32

from numba_engine.backends.ptx import Checks, PtxDevice, PtxError
from tests.ptx import kernels
from tests.ptx.kernels import f32_1d, load, u32_1d

CASES: list[tuple[Any, list[Any], list[Any], int, str, int, int, str]] = [
    # kernel, types, values (arrays are made of their sizes), grid, kind, block, thread, message
    (kernels.bug_past_the_end, [f32_1d, int32], [np.zeros(100, np.float32), 100], 2, "out-of-bounds", 1, 36, "byte 400 of 400"),  # noqa: E501
    (kernels.bug_shared_past_the_end, [f32_1d], [np.zeros(64, np.float32)], 1, "out-of-bounds", 0, 63, r"\+256"),
    (kernels.bug_misaligned, [u32_1d, u32_1d], [np.zeros(64, np.uint32), np.zeros(300, np.uint32)], 1, "misaligned", 0, 20, "multiple of 16"),  # noqa: E501
    (kernels.bug_unwritten_shared, [f32_1d], [np.zeros(64, np.float32)], 1, "uninitialised-shared", 0, 23, r"\+160"),
    (kernels.bug_no_barrier, [f32_1d], [np.zeros(64, np.float32)], 1, "shared-race", 0, 0, r"thread \(63, 0, 0\)"),
    (kernels.bug_write_after_read, [f32_1d], [np.zeros(64, np.float32)], 1, "shared-race", 0, 0, r"thread \(63, 0, 0\)"),  # noqa: E501
    (kernels.bug_all_write_one_word, [f32_1d], [np.zeros(64, np.float32)], 1, "shared-race", 0, 1, r"thread \(0, 0, 0\)"),  # noqa: E501
    (kernels.bug_divergent_barrier, [f32_1d, int32], [np.zeros(64, np.float32), 50], 1, "divergent-barrier", 0, 50, "has exited"),  # noqa: E501
    (kernels.bug_early_exit_before_barrier, [f32_1d, int32], [np.zeros(64, np.float32), 50], 1, "divergent-barrier", 0, 50, "has exited"),  # noqa: E501
    (kernels.bug_unwritten_global, [f32_1d, f32_1d], [np.zeros(64, np.float32), "empty"], 1, "uninitialised-global", 0, 10, "byte 40 "),  # noqa: E501
]  # fmt: skip


@pytest.mark.parametrize(
    ("function", "types", "values", "grid", "kind", "block", "thread", "message"),
    CASES,
    ids=[case[0].__name__ for case in CASES],
)
def test_bug_is_caught(
    function: Any, types: list[Any], values: list[Any], grid: int, kind: str, block: int, thread: int, message: str
) -> None:
    device = PtxDevice(memory_bytes=1 << 22, checks=Checks(uninitialised_global=True))
    kernel = load(device, function, types)
    with pytest.raises(PtxError, match=message) as caught:
        device.execute(kernel, grid, 64, [make(device, value) for value in values])
    error = caught.value
    assert error.kind == kind
    assert error.kernel == function.__name__
    assert error.block == (block, 0, 0)
    assert error.thread == (thread, 0, 0)
    lines, first = inspect.getsourcelines(function)
    planted = first + next(i for i, line in enumerate(lines) if "# BUG" in line)
    assert error.source == f"{inspect.getsourcefile(function)}:{planted}"
    assert error.line is not None
    assert error.text


def make(device: PtxDevice, value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return device.upload(value)
    if value == "empty":
        array = device.empty((64,), np.float32, "x")
        device.arena.write(array.allocation, np.zeros(10, np.float32))
        return array
    return value


def test_shuffle_in_a_branch() -> None:
    device = PtxDevice(memory_bytes=1 << 20)
    kernel = load(device, kernels.bug_shuffle_in_a_branch, [f32_1d])
    with pytest.raises(PtxError, match="reads lane 3") as caught:
        device.execute(kernel, 1, 64, [device.empty((64,), np.float32)])
    assert caught.value.kind == "divergent-warp"


def test_checks_of_shared_memory_can_be_switched_off() -> None:
    device = PtxDevice(memory_bytes=1 << 20, checks=Checks(shared=False))
    out = device.upload(np.zeros(64, np.float32))
    device.execute(load(device, kernels.bug_no_barrier, [f32_1d]), 1, 64, [out])
    assert (device.download(out) == np.arange(64)[::-1]).all()


def test_the_array_beside_is_not_the_array() -> None:
    """A guard gap lies between allocations, and freed memory is nobody's."""
    device = PtxDevice(memory_bytes=1 << 22)
    kernel = load(device, kernels.bug_past_the_end, [f32_1d, int32])
    small, other = device.empty((64,), np.float32, "small"), device.empty((64,), np.float32, "other")
    with pytest.raises(PtxError, match="small byte 256 of 256"):
        device.execute(kernel, 2, 64, [small, 64])
    device.execute(kernel, 1, 64, [other, 60])
    device.free(small)
    with pytest.raises(PtxError, match="out-of-bounds"):
        device.execute(kernel, 1, 64, [small, 60])


def test_constants_cannot_be_written(device: PtxDevice) -> None:
    text = """.version 8.0
.target sm_90
.address_size 64
.const .align 4 .u32 table[4] = {1, 2, 3, 4};
.visible .entry k() { .reg .b64 %d<2>; .reg .b32 %r<2>;
    mov.u64 %d0, table; mov.u32 %r0, 5;
    st.global.u32 [%d0+8], %r0; ret; }"""
    with pytest.raises(PtxError, match=r"table byte 8 of 16 .*, which is constant") as caught:
        device.execute(device.load(text), 1, 32, [])
    assert caught.value.kind == "read-only"
    assert caught.value.line == 7


def test_a_register_that_is_never_written(device: PtxDevice) -> None:
    text = """.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 out) { .reg .b64 %d<2>; .reg .b32 %r<3>;
    ld.param.u64 %d0, [out];
    add.u32 %r0, %r1, 1;
    st.global.u32 [%d0], %r0; ret; }"""
    with pytest.raises(PtxError, match="%r1 is read and never written") as caught:
        device.load(text)
    assert (caught.value.kind, caught.value.line) == ("uninitialised-register", 6)


def test_trap_names_its_thread(device: PtxDevice) -> None:
    text = """.version 8.0
.target sm_90
.address_size 64
.visible .entry k() { .reg .b32 %r<3>; .reg .pred %p<2>;
    mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 5;
    @%p0 trap;
    ret; }"""
    with pytest.raises(PtxError) as caught:
        device.execute(device.load(text, name="k"), 1, 32, [])
    assert (caught.value.kind, caught.value.thread) == ("trap", (5, 0, 0))
