"""linear and linear_add against the reference: formats, awkward shapes, both activation types, and invariance."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.config import ActivationDtype
from numba_engine.formats import (
    BF16,
    F16,
    FORMATS,
    Q4_0,
    Q4_1,
    Q4_K,
    Q6_K,
    Q8_0,
    Format,
    StoredTensor,
    dequantize,
    quantize,
)
from numba_engine.formats.blocks import pack
from numba_engine.formats.descriptor import Parts
from tests.kernels.conftest import MakeBackend, instruction_sets
from tests.reference import ops as reference

ALL = list(FORMATS.values())
QUANTIZED = [f for f in ALL if f.is_quantized]
SHAPES = [(1, 32), (7, 96), (33, 576), (192, 1536)]  # out_features, in_features
FLOAT_SHAPES = [(1, 1), (7, 33), (17, 258), (192, 576)]


def matrix(rng: np.random.Generator, format: Format, rows: int, columns: int) -> StoredTensor:
    """``columns``: at least as many, whole blocks."""
    columns = -(-columns // format.block_size) * format.block_size
    return quantize("w", rng.standard_normal((rows, columns), dtype=np.float32), format)


def run(backend: CpuBackend, tensor: StoredTensor, x: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    out = np.full((len(x), tensor.shape[0]), np.nan, dtype=np.float32)
    backend.linear(out, x, backend.load_weight("w", [tensor]), bias)
    return out


def assert_close(out: np.ndarray, expected: np.ndarray, x: np.ndarray, weight: np.ndarray) -> None:
    """Within what float32 sums of these terms can lose."""
    bound = np.abs(x).astype(np.float64) @ np.abs(weight).T.astype(np.float64)
    assert np.all(np.abs(out - expected) <= 2e-6 * bound + 1e-6)


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("activation_dtype", get_args(ActivationDtype))
def test_equals_the_reference(
    make_backend: MakeBackend, rng: np.random.Generator, format: Format, activation_dtype: ActivationDtype
) -> None:
    backend = make_backend(activation_dtype)
    int8 = activation_dtype == "int8" and format.is_quantized
    bf16 = activation_dtype == "int8" and format is BF16
    for rows, columns in SHAPES if format.is_quantized else FLOAT_SHAPES:
        tensor = matrix(rng, format, rows, columns)
        weight = dequantize(tensor)
        bias = rng.standard_normal(rows, dtype=np.float32)
        for num_tokens in (1, 7, 33):
            x = rng.standard_normal((num_tokens, weight.shape[1]), dtype=np.float32)
            seen = dequantize(quantize("x", x, BF16)) if bf16 else x
            expected = reference.linear_int8(x, weight, bias) if int8 else reference.linear(seen, weight, bias)
            assert_close(run(backend, tensor, x, bias), expected, x, weight)


def test_bf16_rounds_to_even_and_keeps_what_is_not_finite(backend: CpuBackend) -> None:
    one = quantize("w", np.ones((1, 1), dtype=np.float32), BF16)
    ulp = np.float32(2**-7)
    x = np.array([1 + ulp / 2, 1 + ulp * 1.5, 1 + ulp * 0.51, -1 - ulp * 0.49, np.inf, -np.inf], dtype=np.float32)
    expected = np.array([1, 1 + 2 * ulp, 1 + ulp, -1, np.inf, -np.inf], dtype=np.float32)
    assert np.array_equal(run(backend, one, x[:, None])[:, 0], expected)
    nan = np.array([0x7FFFFFFF, 0x7F800001, 0xFFFFFFFF], dtype=np.uint32).view(np.float32)
    assert np.isnan(run(backend, one, nan[:, None])).all()


@pytest.mark.parametrize("format", ALL, ids=lambda f: f.name)
@pytest.mark.parametrize("activation_dtype", get_args(ActivationDtype))
def test_a_row_is_the_same_bits_in_any_company_and_on_any_threads(
    make_backend: MakeBackend, rng: np.random.Generator, format: Format, activation_dtype: ActivationDtype
) -> None:
    tensor = matrix(rng, format, 257, 96)
    x = rng.standard_normal((64, tensor.shape[1]), dtype=np.float32)
    alone = np.concatenate([run(make_backend(activation_dtype, num_threads=1), tensor, row[None]) for row in x])
    for chunk in (2, 3, 7, 64):
        together = np.concatenate(
            [run(make_backend(activation_dtype, num_threads=3), tensor, x[i : i + chunk]) for i in range(0, 64, chunk)]
        )
        assert np.array_equal(together, alone)


@pytest.mark.parametrize("format", [*QUANTIZED, BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("isa", instruction_sets())
def test_every_instruction_set_gives_the_same_bits(
    make_backend: MakeBackend, rng: np.random.Generator, format: Format, isa: str
) -> None:
    tensor = matrix(rng, format, 40, 160)
    x = rng.standard_normal((15, tensor.shape[1]), dtype=np.float32)
    assert np.array_equal(run(make_backend(isa=isa), tensor, x), run(make_backend(), tensor, x))


@pytest.mark.parametrize("isa", instruction_sets())
def test_extreme_integers_do_not_saturate(make_backend: MakeBackend, isa: str) -> None:
    weight = np.full((16, 64), -127, dtype=np.float32)
    weight[:, ::2] = 127
    x = np.where(weight > 0, np.float32(127), np.float32(-127))[:1]
    for sign in (1, -1):
        out = run(make_backend(isa=isa), quantize("w", weight, Q8_0), sign * x)
        assert np.array_equal(out, np.full((1, 16), sign * 64 * 127.0 * 127.0, dtype=np.float32))


def test_zero_activations_give_zero(backend: CpuBackend, rng: np.random.Generator) -> None:
    for format in ALL:
        tensor = matrix(rng, format, 20, 64)
        out = run(backend, tensor, np.zeros((3, tensor.shape[1]), dtype=np.float32))
        assert np.array_equal(out, np.zeros((3, 20)))


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_not_a_number_stays_in_its_row(backend: CpuBackend, rng: np.random.Generator, value: float) -> None:
    x = rng.standard_normal((9, 64), dtype=np.float32)
    x[4, 40] = value
    out = run(backend, matrix(rng, Q4_1, 20, 64), x)
    assert np.isnan(out[4]).all()
    assert np.isfinite(np.delete(out, 4, axis=0)).all()


def test_activations_of_any_size(backend: CpuBackend, rng: np.random.Generator) -> None:
    tensor = matrix(rng, Q8_0, 20, 64)
    x = rng.standard_normal((7, 64), dtype=np.float32)
    x *= np.array([1e-38, 1e-30, 1e-10, 1, 1e10, 1e20, 1e33], dtype=np.float32)[:, None]
    assert_close(run(backend, tensor, x), reference.linear_int8(x, dequantize(tensor)), x, dequantize(tensor))


@pytest.mark.parametrize("activation_dtype", get_args(ActivationDtype))
def test_stacked_parts_of_unlike_formats_and_odd_heights(
    make_backend: MakeBackend, rng: np.random.Generator, activation_dtype: ActivationDtype
) -> None:
    backend = make_backend(activation_dtype)
    parts = [
        matrix(rng, format, rows, 64)
        for format, rows in (
            (Q4_1, 32), (Q4_1, 7), (Q4_1, 16),
            (F16, 5), (Q8_0, 16),
        )
    ]  # fmt: skip
    weight = backend.load_weight("qkv", parts)
    assert weight.shape == (76, 64)
    assert [(s.format.name, s.num_rows) for s in weight.segments] == [
        ("Q4_1", 39), ("Q4_1", 16), ("F16", 5), ("Q8_0", 16)
    ]  # fmt: skip
    x = rng.standard_normal((3, 64), dtype=np.float32)
    out = np.empty((3, 76), dtype=np.float32)
    backend.linear(out, x, weight)
    assert np.array_equal(out, np.concatenate([run(backend, part, x) for part in parts], axis=1))


def test_linear_add_adds(backend: CpuBackend, rng: np.random.Generator) -> None:
    tensor = matrix(rng, Q4_0, 33, 96)
    x = rng.standard_normal((7, 96), dtype=np.float32)
    residual = rng.standard_normal((7, 33), dtype=np.float32)
    expected = residual + run(backend, tensor, x)
    backend.linear_add(residual, x, backend.load_weight("w", [tensor]))
    assert np.array_equal(residual, expected)


def test_weights_take_the_bytes_of_their_file(backend: CpuBackend, rng: np.random.Generator) -> None:
    for format in ALL:
        tensor = matrix(rng, format, 192, 1024)
        # The 6 bits of each of Q4_K's fine scales and minima take a byte.
        padded = 16 - 12 if format is Q4_K else 0
        assert backend.load_weight("w", [tensor]).nbytes == tensor.nbytes + tensor.nbytes // format.block_bytes * padded


def test_nothing_is_written_outside_the_output(backend: CpuBackend, rng: np.random.Generator) -> None:
    memory = np.full((6, 7), 5.0, dtype=np.float32)
    backend.linear(memory[2:4], rng.standard_normal((2, 32), dtype=np.float32),
                   backend.load_weight("w", [matrix(rng, Q4_1, 7, 32)]))  # fmt: skip
    assert np.array_equal(memory[[0, 1, 4, 5]], np.full((4, 7), 5.0))
    assert not (memory[2:4] == 5.0).any()


@pytest.mark.parametrize("isa", instruction_sets())
def test_extreme_scales_of_runs_do_not_overflow(make_backend: MakeBackend, isa: str) -> None:
    """Codes, fine scales and activations of Q6_K as large as they can be, of either sign."""
    for code, fine in ((0, -128), (0, 127), (63, -128), (63, 127)):
        scale = np.ones((16, 1), np.float32)
        blocks = pack(Q6_K, Parts(np.full((16, 256), code), scale, np.full((16, 16), fine)))
        tensor = StoredTensor("w", Q6_K, (16, 256), blocks)
        x = np.full((1, 256), 127 * 256, dtype=np.float32)
        out = run(make_backend(isa=isa), tensor, x)
        np.testing.assert_allclose(out, np.full((1, 16), (code - 32) * fine * 256 * 127.0 * 256), rtol=1e-6)
        assert np.array_equal(run(make_backend(isa=isa), tensor, -x), -out)
