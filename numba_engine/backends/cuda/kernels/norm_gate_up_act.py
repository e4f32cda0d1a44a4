"""norm_gate_up_act: out = activation(gate) * up of gate, up = RMSNorm(x) @ weight.T: the bits of the three ops.

Arrays (flat): out float32 [num_rows, size]; x float32 [num_rows, in_features]; norm_weight float32 [in_features];
weights uint32, packed, [2 size, in_features], gate rows first; size a multiple of 16.

A block's two tiles are 16 rows of gate and the same rows of up, so that whoever adds up the one adds up the other.
Normalised while staged, as ``norm_linear``. Bytes moved: weights once, x and norm_weight a few times a block, out once.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from numba import cuda
from numba.cuda.types import float32, uint32

from numba_engine.backends.arrays import Array
from numba_engine.backends.cuda.compiler import Kernel
from numba_engine.backends.cuda.kernels import norm_linear
from numba_engine.backends.cuda.kernels.gated_activation import ACTIVATION_TIMES, name_with
from numba_engine.backends.cuda.kernels.packing import TILE_ROWS
from numba_engine.backends.cuda.kernels.streaming import MIN_BLOCKS, THREADS, ahead_of, stream, stream_grid, tokens_for
from numba_engine.backends.cuda.kernels.unrolling import unroll_into
from numba_engine.backends.layers import Activation, GatedMlp
from numba_engine.formats import Format, label

if TYPE_CHECKING:
    from numba_engine.backends.cuda.backend import CudaBackend


@cuda.jit(device=True, inline="always")
def _gate_and_up(pair, shape):  # type: ignore[no-untyped-def]
    return pair, uint32(shape[0] + pair)


@cache
def norm_gate_up_act_kernel(format: Format, tokens: int, activation: Activation) -> Kernel:
    activation_times = ACTIVATION_TIMES[activation]

    @cuda.jit(device=True, inline="always")
    def finish(arguments, pair, row, token, gate, up):  # type: ignore[no-untyped-def]
        out, size = arguments
        out[uint32(token * size + pair * uint32(16) + row)] = activation_times(gate, up)

    body = stream(format, tokens, _gate_and_up, finish, is_normed=True)

    def norm_gate_up_act(  # type: ignore[no-untyped-def]
        out, x, norm_weight, weights, eps, num_rows, in_features, num_pairs, size, ahead, num_lines
    ):
        return (
            x, (norm_weight, eps), weights, num_rows, in_features, num_pairs, (num_pairs,), (out, size),
            ahead, num_lines,
        )  # fmt: skip

    arguments = (float32[::1], float32[::1], float32[::1], uint32[::1], float32, *[uint32] * 4, uint32[::1], uint32)
    name = name_with(activation, f"norm_gate_up_act_{label(format)}_x{tokens}")
    return Kernel(name, unroll_into(norm_gate_up_act, body), arguments, THREADS, MIN_BLOCKS)


def supports(
    backend: CudaBackend, mlp_out: Array, gate_up: Array, normed: Array, residual: Array, mlp: GatedMlp
) -> bool:
    return norm_linear.fuses_norm(mlp_out.shape[0], mlp.gate_up_proj)


def launch(backend: CudaBackend, mlp_out: Array, gate_up: Array, normed: Array, residual: Array, mlp: GatedMlp) -> None:
    """One kernel where a block can make gate and up of the same outputs: they are one segment, cut between tiles."""
    (num_rows, size), segments = mlp_out.shape, mlp.gate_up_proj.segments
    if len(segments) > 1 or size % TILE_ROWS:
        norm_linear.launch(backend, gate_up, residual, mlp.norm, mlp.gate_up_proj)
        backend.gated_activation(mlp_out, gate_up, mlp.activation)
        return
    (segment,), tokens, pairs = segments, tokens_for(num_rows), size // TILE_ROWS
    arrays = [mlp_out, residual, mlp.norm.weight, segment.data]
    ahead = ahead_of(backend.next_weights(mlp.gate_up_proj), segment.data, num_rows)
    backend.launch(
        norm_gate_up_act_kernel(segment.format, tokens, mlp.activation),
        stream_grid(backend.device, pairs, num_rows, tokens),
        [*arrays, mlp.norm.eps, num_rows, residual.shape[1], pairs, size, *ahead],
    )
