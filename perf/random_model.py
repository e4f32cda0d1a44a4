"""Models with random weights, made where they run: no checkpoint, no text, no tokenizer.

Each matrix of one layer is drawn here and packed by the backend; the other layers are copies of it on the device, in
memory of their own, so that each step streams as many bytes as the real model's. Values are such that activations keep
their size from layer to layer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Segment, Weight
from numba_engine.backends.cuda.arrays import CudaArray
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.layers import Attention, Layer
from numba_engine.config import EngineConfig
from numba_engine.formats import Format, StoredTensor
from numba_engine.kernel_lab.observed_model import MODELS
from numba_engine.model.config import LayerConfig, ModelConfig, RopeParameters
from numba_engine.model.tensors import Tensor
from numba_engine.model.weights import ModelWeights, build_weights
from perf.random_rows import random_rows

CONFIGS = {
    "8b": MODELS["llama-3-8b"],
    "1b": MODELS["llama-3.2-1b"],
    "tiny": ModelConfig(
        architecture="llama",
        hidden_size=256,
        layers=2 * (LayerConfig(Attention(4, 2, 64, 64**-0.5), RopeParameters(500000.0), intermediate_size=512),),
        vocab_size=1024,
        max_position=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
    ),
}


def make_backend(dry_run: bool, *, fusion: bool = True, graph: bool = True) -> CudaBackend:
    """On GPU 0, or on the executor. Raises BackendUnavailableError saying what is missing."""
    config = EngineConfig(kv_cache_dtype="float16", fusion=fusion, graph=graph)
    if dry_run:
        from numba_engine.backends.ptx import PtxDevice

        return CudaBackend(PtxDevice(), config, name="ptx")
    from numba_engine.backends.cuda.availability import require_gpu
    from numba_engine.backends.cuda.cuda_device import CudaDevice

    require_gpu()
    return CudaBackend(CudaDevice(), config, name="cuda")


def random_model(backend: CudaBackend, config: ModelConfig, format: Format) -> ModelWeights:
    """All matrices in one format; the embedding is the head, whether tied or not: a step reads one row of it."""
    first = build_weights(replace(config, layers=config.layers[:1], tie_word_embeddings=True), _Random(backend, format))
    copies = (_copied_layer(backend, first.layers[0]) for _ in range(config.num_layers - 1))
    return replace(first, layers=(*first.layers, *copies))


class _Random:
    """Random matrices, and vectors of ones."""

    def __init__(self, backend: CudaBackend, format: Format) -> None:
        self._backend = backend
        self._format = format
        self._rng = np.random.default_rng(0)

    def matrix(self, tensor: Tensor) -> Weight:
        return random_weight(self._backend, self._rng, self._format, *tensor.shape)

    def vector(self, tensor: Tensor) -> CudaArray:
        return self._backend.upload(np.ones(tensor.shape, np.float32))


def random_weight(backend: CudaBackend, rng: np.random.Generator, format: Format, rows: int, columns: int) -> Weight:
    tensor = StoredTensor("random", format, (rows, columns), random_rows(rng, format, rows, columns))
    return backend.load_weight("random", [tensor])


def _copied_layer(backend: CudaBackend, layer: Layer) -> Layer:
    copies = {name: copied_weight(backend, weight) for name, weight in layer.matrices.items()}
    mlp = replace(layer.mlp, gate_up_proj=copies.pop("gate_up_proj"), down_proj=copies.pop("down_proj"))
    return replace(layer, mlp=mlp, **copies)


def copied_weight(backend: CudaBackend, weight: Weight) -> Weight:
    """The same weight in memory of its own."""
    segments = (
        Segment(segment.format, segment.num_rows, segment.nbytes, _copied(backend, segment.data))
        for segment in weight.segments
    )
    return Weight(weight.name, weight.shape, tuple(segments))


def _copied(backend: CudaBackend, array: Any) -> CudaArray:
    copy = backend.empty(array.shape, array.dtype)
    if backend.name == "ptx":
        backend.device.write(copy.on_device, backend.device.download(array.on_device))
    else:
        from cupy.cuda import runtime

        source, target = array.on_device.pointer, copy.on_device.pointer
        stream = backend.device.stream.ptr
        runtime.memcpyAsync(target, source, array.nbytes, runtime.memcpyDeviceToDevice, stream)
    return copy


def clear(backend: CudaBackend, array: Any) -> None:
    """Zeros everywhere: memory that was never written may hold NaN, and a NaN may draw no token at all."""
    if backend.name == "ptx":
        backend.device.write(array.on_device, np.zeros(array.shape, array.dtype))
    else:
        from cupy.cuda import runtime

        runtime.memsetAsync(array.on_device.pointer, 0, array.nbytes, backend.device.stream.ptr)


def streamed_bytes(weights: ModelWeights) -> int:
    """Of the matrices that every step reads."""
    matrices = (matrix for layer in weights.layers for matrix in layer.matrices.values())
    return weights.lm_head.nbytes + sum(matrix.nbytes for matrix in matrices)
