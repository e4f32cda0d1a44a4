"""Memory of the simulated device: allocation, reuse, limits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from numba_engine.backends.ptx import PtxDevice, PtxError
from numba_engine.errors import OutOfMemoryError
from tests.ptx.snippets import HEADER


def test_arrays_hold_what_is_written() -> None:
    device = PtxDevice(memory_bytes=1 << 20)
    host = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    array = device.upload(host, "a")
    host[:] = 0
    assert (array.shape, array.dtype, array.nbytes, array.name) == ((2, 3, 4), np.dtype(np.int16), 48, "a")
    assert array.strides == (24, 8, 2)
    assert (device.download(array) == np.arange(24).reshape(2, 3, 4)).all()
    flat = array.reshape(24)
    device.write(flat, np.arange(24, 0, -1, dtype=np.int16))
    assert device.download(array)[1, 2, 3] == 1
    with pytest.raises(ValueError, match="cannot reshape"):
        array.reshape(5, 5)
    with pytest.raises(ValueError, match="written to a"):
        device.write(flat, np.zeros(24, np.float32))
    downloaded = device.download(array)
    downloaded[:] = 7
    assert device.download(array)[1, 2, 3] == 1


def test_memory_is_counted_reused_and_limited() -> None:
    device = PtxDevice(memory_bytes=1 << 20)
    before = device.memory_info()
    assert before.total_bytes == 1 << 20
    arrays = [device.empty((1000,), np.float64, f"a{i}") for i in range(100)]
    assert before.free_bytes - device.memory_info().free_bytes == 800_000
    with pytest.raises(OutOfMemoryError, match=r"big needs 400000 bytes; .* 1048576"):
        device.empty((100_000,), np.float32, "big")
    device.free(arrays[50])
    again = device.empty((1000,), np.float64, "again")
    assert again.pointer == arrays[50].pointer
    starts = sorted(array.pointer for array in [*arrays[:50], *arrays[51:], again])
    assert all(start % 256 == 0 for start in starts)
    assert min(b - a for a, b in itertools.pairwise(starts)) >= 8000 + 512


def test_a_module_with_several_kernels_needs_a_name() -> None:
    device = PtxDevice(memory_bytes=1 << 20)
    text = HEADER + ".visible .entry first() { ret; }\n.visible .entry second() { ret; }"
    with pytest.raises(PtxError, match=r"\['first', 'second'\]"):
        device.load(text)
    with pytest.raises(PtxError, match="no kernel third"):
        device.load(text, "third")
    device.execute(device.load(text, "second"), 1, 32, [])


def test_constant_tables_and_globals_outlive_a_launch() -> None:
    device = PtxDevice(memory_bytes=1 << 20)
    text = """
.global .align 4 .u32 calls = 40;
.visible .entry k(.param .u64 out) {
    .reg .b32 %r<3>; .reg .b64 %d<2>;
    ld.global.u32 %r0, [calls]; add.u32 %r0, %r0, 1; st.global.u32 [calls], %r0;
    ld.param.u64 %d0, [out]; st.global.u32 [%d0], %r0; ret;
}"""
    kernel = device.load(HEADER + text)
    out = device.upload(np.zeros(1, np.uint32))
    for want in (41, 42):
        device.execute(kernel, 1, 1, [out.pointer])
        assert device.download(out)[0] == want
    # A second load is a second module with variables of its own.
    device.execute(device.load(HEADER + text), 1, 1, [out.pointer])
    assert device.download(out)[0] == 41
