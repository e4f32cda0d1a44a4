"""Layers that differ in all they may differ in, and a model's own scales, through the decoder."""

from __future__ import annotations

import numpy as np
import pytest

from numba_engine.backends import create_backend
from numba_engine.backends.arrays import Array, Weight
from numba_engine.backends.base import Backend
from numba_engine.backends.layers import Attention
from numba_engine.config import BackendName, EngineConfig
from numba_engine.formats import F32, quantize
from numba_engine.model.config import OUT_NORMS, QK_NORMS, QKV_BIAS, LayerConfig, ModelConfig, RopeParameters
from numba_engine.model.tensors import Tensor
from numba_engine.model.weights import build_weights
from tests.golden.forward import Forward
from tests.reference import decoder as reference

MODEL = ModelConfig(
    architecture="odd",
    hidden_size=64,
    layers=(
        LayerConfig(Attention(4, 2, 16, 0.25), RopeParameters(10000.0), intermediate_size=96),
        LayerConfig(
            Attention(6, 3, 8, 0.7, window=5, softcap=2.5),
            rope=None,
            intermediate_size=48,
            activation="gelu_tanh",
            optional_tensors=OUT_NORMS | QKV_BIAS,
            residual_scale=0.5,
        ),
        LayerConfig(
            Attention(2, 1, 32, 0.2, window=9),
            rope=RopeParameters(50.0),
            intermediate_size=40,
            activation="gelu_tanh",
            optional_tensors=QK_NORMS,
            residual_scale=1.5,
        ),
        LayerConfig(
            Attention(4, 2, 16, 0.25),
            RopeParameters(10000.0),
            intermediate_size=96,
            optional_tensors=OUT_NORMS | QK_NORMS,
        ),
    ),
    vocab_size=97,
    max_position=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_ids=(),
    embedding_scale=8.0,
    logit_scale=2.0,
    logit_softcap=3.0,
)
PROMPT = np.random.default_rng(1).integers(0, MODEL.vocab_size, 21).tolist()


class RandomTensors:
    """Random matrices and norms, kept in ``values`` too."""

    def __init__(self, backend: Backend) -> None:
        self.values: dict[str, np.ndarray] = {}
        self._backend = backend
        self._rng = np.random.default_rng(0)

    def matrix(self, tensor: Tensor) -> Weight:
        rows, columns = tensor.shape
        values = (self._rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)
        self.values[tensor.full_name] = values
        return self._backend.load_weight(tensor.full_name, [quantize(tensor.full_name, values, F32)])

    def vector(self, tensor: Tensor) -> Array:
        values = (1 + 0.3 * self._rng.standard_normal(tensor.shape)).astype(np.float32)
        self.values[tensor.full_name] = values
        return self._backend.upload(values)


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "ptx"])
def test_logits_are_those_of_the_reference(backend: BackendName, fusion: bool) -> None:
    config = EngineConfig(backend=backend, num_threads=2, activation_dtype="float32", fusion=fusion)
    on = create_backend(config)
    tensors = RandomTensors(on)
    forward = Forward(MODEL, build_weights(MODEL, tensors), on, config, max_tokens=len(PROMPT))
    rows = (0, 4, 5, 8, 9, 20)
    expected = reference.forward(MODEL, tensors.values, PROMPT)[list(rows)]
    assert 1 < np.abs(expected).max() < 3  # logits are spread, and bounded
    np.testing.assert_allclose(forward.logits(PROMPT, rows), expected, rtol=0, atol=5e-5)
    one = forward.logits(PROMPT[:1], (0,))  # few rows go other ways
    np.testing.assert_allclose(one, expected[:1], rtol=0, atol=5e-5)
