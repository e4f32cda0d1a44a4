"""A kernel around one instruction: thread i loads element i of every operand, and stores the result."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from numba_engine.backends.ptx import PtxDevice

HEADER = ".version 8.7\n.target sm_90a\n.address_size 64\n"
_REGISTERS = {1: ("h", "b16"), 2: ("h", "b16"), 4: ("r", "b32"), 8: ("d", "b64")}


def kernel_text(
    code: str, inputs: Sequence[np.dtype | str], output: np.dtype | str, declarations: str = "", name: str = "k"
) -> str:
    """``code`` names its operands {a} {b} {c} {e} and its result {d}; %p0…%p7 and %t0…%t7 (b32) are free."""
    lines = []
    names = {}
    for place, letter in enumerate("abce"[: len(inputs)]):
        size = np.dtype(inputs[place]).itemsize
        prefix, _ = _REGISTERS[size]
        register = f"%{prefix}{place + 1}"
        names[letter] = register
        lines.append(f"""    ld.param.u64 %d10, [in{place}];
    mad.wide.u32 %d11, %i0, {size}, %d10;
    ld.global.{"u8" if size == 1 else f"b{8 * size}"} {register}, [%d11];""")
    size = np.dtype(output).itemsize
    prefix, _ = _REGISTERS[size]
    names["d"] = f"%{prefix}0"
    params = ", ".join([".param .u64 out", *(f".param .u64 in{place}" for place in range(len(inputs)))])
    body = "\n".join(lines)
    return f"""
{declarations}
.visible .entry {name}({params})
{{
    .reg .b16 %h<8>; .reg .b32 %r<8>; .reg .b32 %t<8>; .reg .b64 %d<12>; .reg .pred %p<8>; .reg .b32 %i0;
    mov.u32 %i0, %tid.x;
{body}
    {code.format(**names)}
    ld.param.u64 %d10, [out];
    mad.wide.u32 %d11, %i0, {size}, %d10;
    st.global.{"u8" if size == 1 else f"b{8 * size}"} [%d11], {names["d"]};
    ret;
}}
"""


def run(
    device: PtxDevice,
    code: str,
    inputs: Sequence[np.ndarray],
    output: np.dtype | str,
    declarations: str = "",
) -> np.ndarray:
    """Execute the instruction on every element; several blocks of up to 256 threads are not needed: one suffices."""
    count = len(inputs[0])
    assert count <= 1024
    text = HEADER + kernel_text(code, [array.dtype for array in inputs], output, declarations)
    kernel = device.load(text, name="k")
    out = device.upload(np.zeros(count, output))
    arrays = [device.upload(array) for array in inputs]
    try:
        device.execute(kernel, 1, count, [out.pointer, *(array.pointer for array in arrays)])
        return device.download(out)
    finally:
        for array in (out, *arrays):
            device.free(array)
