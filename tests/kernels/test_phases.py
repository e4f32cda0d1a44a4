"""The fused phases give bit for bit what the ops one by one give, for tokens and for prompts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from numba_engine.backends.arrays import Norm
from numba_engine.backends.base import OPS
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.layers import Activation, GatedMlp
from numba_engine.formats import BF16, F16, Q4_1, Q4_K, Q6_K, Q8_0, Format, StoredTensor, quantize
from tests.kernels.conftest import MakeBackend

HIDDEN = 2048  # long enough for blocks of x to be cut unlike in unlike formats
EPS = 1e-5


def mlp_of(
    backend: CpuBackend,
    rng: np.random.Generator,
    intermediate: int,
    *formats: Format,
    activation: Activation = "silu",
) -> GatedMlp:
    def matrix(rows: int, format: Format) -> StoredTensor:
        return quantize("w", rng.standard_normal((rows, HIDDEN), dtype=np.float32), format)

    norm = rng.standard_normal(HIDDEN).astype(np.float32)
    gate_up = backend.load_weight("gate_up", [matrix(intermediate, format) for format in formats])
    other = backend.load_weight("other", [matrix(16, formats[0])])
    return GatedMlp(Norm(norm, EPS), gate_up, activation, other)


@pytest.mark.parametrize("rows", [1, 15, 16, 67, 300])
@pytest.mark.parametrize(
    ("intermediate", "formats", "activation"),
    [
        (176, (Q4_1, Q4_1), "silu"),  # an odd number of groups
        (176, (Q4_K, Q4_K), "silu"),
        (192, (Q8_0, F16), "silu"),  # a segment each
        (192, (Q6_K, Q4_K), "silu"),  # scales of runs of 16 and of 32
        (24, (BF16, BF16), "silu"),  # not whole groups
        (176, (Q8_0, Q8_0), "gelu_tanh"),
    ],
)
def test_gate_up(
    make_backend: MakeBackend,
    rng: np.random.Generator,
    rows: int,
    intermediate: int,
    formats: tuple[Format, Format],
    activation: Activation,
) -> None:
    backend = make_backend(num_threads=3)
    mlp = mlp_of(backend, rng, intermediate, *formats, activation=activation)
    residual = rng.standard_normal((rows, HIDDEN), dtype=np.float32)

    def run(phase: Callable[..., None]) -> np.ndarray:
        out = np.full((rows, intermediate), np.nan, dtype=np.float32)
        gate_up = np.full((rows, 2 * intermediate), np.nan, dtype=np.float32)
        phase(backend, out, gate_up, np.empty_like(residual), residual, mlp)
        return out

    assert np.array_equal(run(CpuBackend.norm_gate_up_act), run(OPS["norm_gate_up_act"].compose))


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_lm_head(backend: CpuBackend, rng: np.random.Generator, rows: int) -> None:
    head = backend.load_weight("head", [quantize("head", rng.standard_normal((1000, HIDDEN)).astype(np.float32),
                                                 Q8_0)])  # fmt: skip
    residual = rng.standard_normal((40, HIDDEN), dtype=np.float32)
    norm = rng.standard_normal(HIDDEN).astype(np.float32)
    wanted = rng.permutation(40)[:rows].astype(np.int32)

    def run(phase: Callable[..., None]) -> np.ndarray:
        logits = np.full((rows, 1000), np.nan, dtype=np.float32)
        last = np.empty((rows, HIDDEN), dtype=np.float32)
        phase(backend, logits, last, residual, wanted, Norm(norm, EPS), head)
        return logits

    assert np.array_equal(run(CpuBackend.norm_lm_head), run(OPS["norm_lm_head"].compose))
