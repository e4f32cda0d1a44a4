"""norm_linear: out = RMSNorm(x[rows]) @ weight.T (+ bias); equal to gather_rows, rms_norm and linear, bit by bit.

Arrays (flat): out float32 [num_rows, out_stride]; x float32 [*, in_features]; rows int32 [num_rows] (if gathered);
norm_weight float32 [in_features]; weights, bias as ``linear``.

Every block normalises x anew while it stages it: x comes from L2, and the first weights are on their way already. No
weight waits for a kernel that only normalises. Bytes moved: weights once, x and norm_weight a few times a block.
"""

from __future__ import annotations

from functools import cache

from numba.cuda.types import float32, int32, uint32

from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.device import Device, DeviceArray, flat
from numba_engine.backends.cuda.kernels.linear import PackedSegment, neighbours, write_outputs
from numba_engine.backends.cuda.kernels.packing import num_tiles
from numba_engine.backends.cuda.kernels.streaming import MIN_BLOCKS, THREADS, ahead_of, stream, stream_grid, tokens_for
from numba_engine.backends.cuda.kernels.unrolling import unroll_into
from numba_engine.formats import Format


@cache
def norm_linear_kernel(format: Format, tokens: int, is_gathered: bool) -> Kernel:
    body = stream(format, tokens, neighbours, write_outputs, is_normed=True, is_gathered=is_gathered)

    def norm_linear(  # type: ignore[no-untyped-def]
        out, x, rows, norm_weight, weights, bias, eps, num_rows, in_features, out_features, num_pairs, out_stride,
        out_offset, has_bias, ahead, num_lines,
    ):  # fmt: skip
        return (
            x, (norm_weight, eps, rows), weights, num_rows, in_features, num_pairs, (),
            (out, bias, out_features, out_stride, out_offset, uint32(0), has_bias), ahead, num_lines,
        )  # fmt: skip

    arrays = (float32[::1], float32[::1], int32[::1], float32[::1], uint32[::1], float32[::1])
    name = f"norm_linear_{format.name.lower()}{'_rows' if is_gathered else ''}_x{tokens}"
    return Kernel(
        name,
        unroll_into(norm_linear, body),
        (*arrays, float32, *[uint32] * 7, uint32[::1], uint32),
        THREADS,
        MIN_BLOCKS,
    )


def norm_linear(
    device: Device,
    out: DeviceArray,
    x: DeviceArray,
    segments: list[PackedSegment],
    norm_weight: DeviceArray,
    eps: float,
    *,
    rows: DeviceArray | None = None,
    bias: DeviceArray | None = None,
    next_weights: DeviceArray | None = None,
) -> None:
    """A launch a segment of equal format, none of them F32."""
    (num_rows, out_stride), in_features = out.shape, x.shape[1]
    tokens, first_feature = tokens_for(num_rows), 0
    for segment in segments:
        pairs = num_tiles(segment.num_rows) // 2
        some_rows = segment.weights.view("int32") if rows is None else rows
        arrays = [flat(out), flat(x), some_rows, norm_weight, segment.weights, norm_weight if bias is None else bias]
        sizes = [num_rows, in_features, segment.num_rows, pairs, out_stride, first_feature, int(bias is not None)]
        kernel = norm_linear_kernel(segment.format, tokens, rows is not None)
        ahead = ahead_of(next_weights if segment is segments[-1] else None, segment.weights, num_rows)
        device.launch(kernel, stream_grid(device, pairs, num_rows, tokens), [*arrays, eps, *sizes, *ahead])
        first_feature += segment.num_rows
