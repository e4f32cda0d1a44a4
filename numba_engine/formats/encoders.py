"""ggml's reference quantisers (``quantize_row_*_ref`` of ggml-quants.c) in NumPy, for tests and converters.

Each takes float32 [blocks, block_size] and gives the numbers of the blocks; where they lie is the descriptor's matter.
"""

from __future__ import annotations

import numpy as np

from numba_engine.formats.descriptor import Parts


def q8_0(blocks: np.ndarray) -> Parts:
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    return Parts(_round_half_away(blocks * _reciprocal(scale)).astype(np.int32), scale)


def q4_0(blocks: np.ndarray) -> Parts:
    scale = _extreme(blocks) / np.float32(-8)
    return Parts(_truncated(blocks * _reciprocal(scale) + np.float32(8.5), 15), scale)


def q4_1(blocks: np.ndarray) -> Parts:
    low = blocks.min(axis=1, keepdims=True)
    scale = (blocks.max(axis=1, keepdims=True) - low) / np.float32(15)
    return Parts(_truncated((blocks - low) * _reciprocal(scale) + np.float32(0.5), 15), scale, minimum=low)


def q4_k(blocks: np.ndarray) -> Parts:
    """Scales and minima per 32 values by weighted least squares (``make_qkx2_quants``), then rounded to 6 bits."""
    runs = blocks.reshape(-1, 8, 32)
    magnitude = np.sqrt(_total(np.square(runs)) / np.float32(32))
    scales, minima = _affine_fit(runs, magnitude + np.abs(runs), 15, first=-1.0, step=0.1, steps=20)
    scale, fine_scales = _shared(scales, 63)
    minimum, fine_minima = _shared(minima, 63)
    scales, minima = (_as_f16(scale) * fine_scales)[..., None], (_as_f16(minimum) * fine_minima)[..., None]
    codes = _codes(_quotient(runs + minima, scales), 0, 15)
    return Parts(codes.reshape(blocks.shape), scale, fine_scales, minimum, fine_minima)


def q6_k(blocks: np.ndarray) -> Parts:
    """Scales per 16 values by least squares (``make_qx_quants``), then rounded to 8 bits."""
    runs = blocks.reshape(-1, 16, 16)
    scales = _symmetric_fit(runs, 32)[..., 0]
    inverse = _quotient(np.float32(-128), _extreme(scales))
    scale = _reciprocal(inverse)
    fine = np.minimum(np.rint(inverse * scales), 127).astype(np.int32)
    codes = _codes(_quotient(runs, (_as_f16(scale) * fine)[..., None]), -32, 31) + 32
    return Parts(codes.reshape(blocks.shape), scale, fine)


_MIN_MAGNITUDE = 1e-15  # smaller runs are taken as zero


def _affine_fit(
    x: np.ndarray, weights: np.ndarray, max_code: int, *, first: float, step: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima (subtracted, not negative) of runs: the last axis of ``x``."""
    high, minimum = x.max(axis=-1, keepdims=True), np.minimum(x.min(axis=-1, keepdims=True), 0)
    sum_w, sum_x = _total(weights), _total(weights * x)
    inverse = _quotient(np.float32(max_code), high - minimum)
    scale = _reciprocal(inverse)
    error = _total(weights * np.square(scale * _codes(inverse * (x - minimum), 0, max_code) + minimum - x))
    for i in range(steps + 1):
        wanted = np.float32(first) + np.float32(step) * np.float32(i) + np.float32(max_code)
        codes = _codes(_quotient(wanted, high - minimum) * (x - minimum), 0, max_code).astype(np.float32)
        sum_l, sum_l2, sum_xl = _total(weights * codes), _total(weights * codes * codes), _total(weights * codes * x)
        determinant = np.maximum(sum_w * sum_l2 - sum_l * sum_l, 0)
        new_scale = _quotient(sum_w * sum_xl - sum_x * sum_l, determinant)
        new_minimum = _quotient(sum_l2 * sum_x - sum_l * sum_xl, determinant)
        new_scale = np.where(new_minimum > 0, _quotient(sum_xl, sum_l2), new_scale)
        new_minimum = np.minimum(new_minimum, 0)
        new_error = _total(weights * np.square(new_scale * codes + new_minimum - x))
        is_better = (determinant > 0) & (new_error < error)
        scale = np.where(is_better, new_scale, scale)
        minimum = np.where(is_better, new_minimum, minimum)  # also of the next step's codes
        error = np.where(is_better, new_error, error)
    return scale[..., 0], -minimum[..., 0]


def _symmetric_fit(x: np.ndarray, half: int) -> np.ndarray:
    """Scales of runs, the last axis of ``x``, for codes −half … half − 1; errors weigh x²."""
    extreme = _extreme(x)
    extreme[np.abs(extreme) < _MIN_MAGNITUDE] = 0
    scale = best = np.zeros_like(extreme)
    for i in (0, *range(-9, 0), *range(1, 10)):
        wanted = -(np.float32(half) + np.float32(0.1) * np.float32(i))
        codes = _codes(_quotient(wanted, extreme) * x, -half, half - 1).astype(np.float32)
        sum_xl, sum_l2 = _total(x * x * x * codes), _total(x * x * codes * codes)
        is_better = (sum_l2 > 0) & ((sum_xl * sum_xl > best * sum_l2) | (i == 0))
        scale = np.where(is_better, _quotient(sum_xl, sum_l2), scale)
        best = np.where(is_better, scale * sum_xl, best)
    return scale


def _shared(scales: np.ndarray, max_fine: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers ≥ 0, one row per block, as one coarse number per block and integers 0 … max_fine."""
    largest = scales.max(axis=1, keepdims=True)
    fine = _codes(_quotient(np.float32(max_fine), largest) * scales, 0, max_fine)
    return largest / np.float32(max_fine), fine


def _codes(values: np.ndarray, low: int, high: int) -> np.ndarray:
    return np.clip(np.rint(values), low, high).astype(np.int32)


def _extreme(values: np.ndarray) -> np.ndarray:
    """The number of largest magnitude along the last axis."""
    return np.take_along_axis(values, np.abs(values).argmax(axis=-1, keepdims=True), axis=-1)


def _total(values: np.ndarray) -> np.ndarray:
    """Along the last axis, one after the other."""
    return np.cumsum(values, axis=-1, dtype=np.float32)[..., -1:]


def _truncated(values: np.ndarray, max_code: int) -> np.ndarray:
    return np.clip(values, 0, max_code).astype(np.int32)


def _as_f16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).astype(np.float32)


def _round_half_away(values: np.ndarray) -> np.ndarray:
    """C's ``roundf``; ``np.round`` would take halves to even."""
    magnitude = np.abs(values)
    whole = np.floor(magnitude)
    return np.copysign(whole + np.floor(2 * (magnitude - whole)), values)


def _reciprocal(scale: np.ndarray) -> np.ndarray:
    return _quotient(np.float32(1), scale)


def _quotient(a: np.ndarray | np.float32, b: np.ndarray) -> np.ndarray:
    """a / b; 0 where b is."""
    shape = np.broadcast_shapes(np.shape(a), b.shape)
    return np.divide(a, b, out=np.zeros(shape, np.float32), where=b != 0)
