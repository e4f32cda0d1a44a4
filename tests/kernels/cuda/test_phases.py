"""Fused phases: the bits of the textbook ops, in every shape that decides how much is fused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

from numba_engine.backends.arrays import Batch, KVCacheLayer, Norm, RopeTable, Weight
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.kernels.streaming import TOKENS
from numba_engine.backends.layers import ACTIVATIONS, Activation, Attention, GatedMlp, Layer
from numba_engine.backends.ptx import PtxDevice
from numba_engine.config import EngineConfig
from numba_engine.formats import BF16, F16, F32, Q4_0, Q4_1, Q8_0, Format, quantize
from tests.kernels.cuda.conftest import filled, normal

HIDDEN, EPS = 96, 1e-5


@cache
def backend_on(device: str, *, fusion: bool) -> CudaBackend:
    config = EngineConfig(fusion=fusion)
    if device == "ptx":
        return CudaBackend(PtxDevice(counting=True), config, name="ptx")
    from numba_engine.backends.cuda.cuda_device import CudaDevice

    return CudaBackend(CudaDevice(), config, name="cuda")


def num_launches(backend: CudaBackend) -> int:
    device = backend.device
    assert isinstance(device, PtxDevice)
    count = len(device.launches)
    device.launches.clear()
    return count


def matrix(backend: CudaBackend, seed: int, formats: Sequence[Format], rows: Sequence[int]) -> Weight:
    rng = np.random.default_rng(seed)
    parts = [quantize("w", normal(rng, n, HIDDEN), format) for format, n in zip(formats, rows, strict=True)]
    return backend.load_weight("w", parts)


@dataclass(frozen=True)
class QkvCase:
    head_dim: int = 64
    formats: tuple[Format, ...] = (Q4_1,) * 3
    has_bias: bool = False
    has_head_norm: bool = False
    kv_dtype: type = np.float16
    launches: int = 1

    def run(self, backend: CudaBackend, num_tokens: int) -> list[np.ndarray]:
        """q, and both caches."""
        rng = np.random.default_rng(num_tokens)
        heads, kv_heads, d = 3, 2, self.head_dim
        shape = Attention(heads, kv_heads, d, d**-0.5)
        up = backend.upload
        norms = [Norm(up(normal(rng, n)), EPS) for n in (HIDDEN, d, d)]
        bias = up(normal(rng, (heads + 2 * kv_heads) * d)) if self.has_bias else None
        qkv_proj = matrix(backend, 1, self.formats, (heads * d, kv_heads * d, kv_heads * d))
        q_norm, k_norm = norms[1:] if self.has_head_norm else (None, None)
        slots = rng.permutation(32)[:num_tokens].astype(np.int32)
        slots[-1] = -1 if num_tokens > 2 else slots[-1]  # a padding row
        positions = up(rng.integers(0, 40, num_tokens).astype(np.int32))
        batch = Batch(positions, positions, up(slots), *[positions] * 4, num_tokens, 1, 1, 1, 1)  # type: ignore[call-arg, arg-type]
        cache = KVCacheLayer(*(up(np.zeros((4, kv_heads, 8, d), self.kv_dtype)) for _ in "kv"))
        table = RopeTable(up(normal(rng, 40, d // 2)), up(normal(rng, 40, d // 2)))
        mlp = GatedMlp(norms[0], qkv_proj, "silu", qkv_proj)
        layer = Layer(replace(shape, rope=table), norms[0], qkv_proj, bias, q_norm, k_norm, qkv_proj, mlp)
        width = (heads + 2 * kv_heads) * d
        qkv, normed = filled(backend, num_tokens, width), filled(backend, num_tokens, HIDDEN)
        residual = up(normal(rng, num_tokens, HIDDEN))
        backend.norm_qkv_rope_store(qkv, normed, residual, layer, cache, batch)
        return [backend.download(qkv)[:, : heads * d], backend.download(cache.k), backend.download(cache.v)]


@pytest.mark.parametrize(
    ("case", "num_tokens"),
    [
        (QkvCase(), 1),
        (QkvCase(has_bias=True, formats=(BF16,) * 3, kv_dtype=np.float32), 3),
        (QkvCase(formats=(Q4_1, Q4_1, Q8_0), launches=2), 3),
        (QkvCase(has_head_norm=True, launches=4), 1),
        (QkvCase(head_dim=80, launches=3), 1),
        (QkvCase(formats=(F32,) * 3, launches=4), 1),
        (QkvCase(launches=4), TOKENS[-1] + 1),
    ],
    ids=["one", "bias", "mixed", "head norm", "head of 80", "float32", "many"],
)
def test_norm_qkv_rope_store(device: str, case: QkvCase, num_tokens: int) -> None:
    fused, textbook = (backend_on(device, fusion=fusion) for fusion in (True, False))
    if device == "ptx":
        num_launches(fused)
    outputs = case.run(fused, num_tokens)
    if device == "ptx":
        assert num_launches(fused) == case.launches
    for output, expected in zip(outputs, case.run(textbook, num_tokens), strict=True):
        np.testing.assert_array_equal(output, expected)


def gate_up_act(
    backend: CudaBackend, formats: tuple[Format, ...], size: int, residual: np.ndarray, activation: Activation
) -> np.ndarray:
    norm = Norm(backend.upload(normal(np.random.default_rng(5), HIDDEN)), EPS)
    weight = matrix(backend, 6, formats, (size, size))
    scratch, num_tokens = backend.upload(residual), len(residual)
    out, gate_up = filled(backend, num_tokens, size), filled(backend, num_tokens, 2 * size)
    backend.norm_gate_up_act(
        out, gate_up, filled(backend, num_tokens, HIDDEN), scratch, GatedMlp(norm, weight, activation, weight)
    )
    return backend.download(out)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    ("formats", "size", "num_tokens", "launches"),
    [
        ((Q4_1, Q4_1), 48, 1, 1),
        ((BF16, BF16), 80, 3, 1),
        ((F16, F16), 16, 6, 1),
        ((Q4_0, Q8_0), 48, 1, 3),
        ((Q4_1, Q4_1), 40, 1, 2),
        ((Q4_1, Q4_1), 48, TOKENS[-1] + 1, 3),
    ],
)
def test_norm_gate_up_act(
    device: str,
    formats: tuple[Format, ...],
    size: int,
    num_tokens: int,
    launches: int,
    activation: Activation,
) -> None:
    fused, textbook = (backend_on(device, fusion=fusion) for fusion in (True, False))
    residual = normal(np.random.default_rng(7), num_tokens, HIDDEN)
    if device == "ptx":
        num_launches(fused)
    out = gate_up_act(fused, formats, size, residual, activation)
    if device == "ptx":
        assert num_launches(fused) == launches
    np.testing.assert_array_equal(out, gate_up_act(textbook, formats, size, residual, activation))


@pytest.mark.parametrize("num_rows", [1, 5])
def test_norm_lm_head_takes_the_rows_it_is_given(device: str, num_rows: int) -> None:
    rng = np.random.default_rng(3)
    residual, norm = normal(rng, 7, HIDDEN), normal(rng, HIDDEN)
    rows = np.array([6, 0, 3, 5, 2][:num_rows], np.int32)
    outputs = []
    for fusion in (True, False):
        backend = backend_on(device, fusion=fusion)
        logits, last = filled(backend, num_rows, 257), filled(backend, num_rows, HIDDEN)
        head = matrix(backend, 4, (Q8_0,), (257,))
        x, listed, weight = (backend.upload(array) for array in (residual, rows, norm))
        backend.norm_lm_head(logits, last, x, listed, Norm(weight, EPS), head)
        outputs.append(backend.download(logits))
    np.testing.assert_array_equal(outputs[0], outputs[1])
