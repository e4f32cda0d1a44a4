"""Models of real shape, full of zeros, whose steps are looked at launch by launch without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer, Weight
from numba_engine.backends.base import OPS
from numba_engine.backends.cuda.arrays import CudaArray
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.layers import Attention
from numba_engine.backends.sampling import Sampled, Sampling
from numba_engine.config import EngineConfig, KVCacheDtype
from numba_engine.formats import Format, StoredTensor
from numba_engine.kernel_lab.observed import ObservedLaunch, ObservingDevice
from numba_engine.model.activations import Activations
from numba_engine.model.config import LayerConfig, ModelConfig, RopeParameters
from numba_engine.model.decoder import Decoder
from numba_engine.model.rope import build_rope_tables
from numba_engine.model.tensors import Tensor
from numba_engine.model.weights import build_weights

WEIGHT, KV, VECTOR, TABLE = "weight", "kv", "vector", "table"
"""How the names of arrays begin: matrices that are read whole, keys and values, norms and biases, and a table of which
some rows are read."""
_TABLE_ROWS = 64
_BLOCK_SIZE = 16


def _llama(hidden: int, intermediate: int, layers: int, heads: int, head_dim: int, *, tied: bool) -> ModelConfig:
    layer = LayerConfig(
        attention=Attention(heads, 8, head_dim, head_dim**-0.5),
        rope=RopeParameters(theta=500000.0),
        intermediate_size=intermediate,
    )
    return ModelConfig(
        architecture="llama",
        hidden_size=hidden,
        layers=(layer,) * layers,
        vocab_size=128256,
        max_position=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_ids=(),
    )


MODELS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama-3-8b": _llama(4096, 14336, 32, 32, 128, tied=False),
        "llama-3.2-1b": _llama(2048, 8192, 16, 32, 64, tied=True),
    }
)
"""Shapes of Meta's config.json."""


class ObservedModel:
    """One layer of a model, its embedding and its head, on a device that looks at samples of each launch.

    The layers of the real model all launch the same. Steps go through the real decoder; ``ObservedLaunch.label`` is the
    op that it called, for ``linear_add`` with the weight; of an op that is composed after the layers, both.
    """

    def __init__(
        self,
        device: ObservingDevice,
        config: ModelConfig,
        format: Format,
        *,
        fusion: bool = True,
        kv_cache_dtype: KVCacheDtype = "float16",
    ) -> None:
        self._device = device
        self._config = replace(config, layers=config.layers[:1], tie_word_embeddings=False)
        self.backend = CudaBackend(device, EngineConfig(kv_cache_dtype=kv_cache_dtype, fusion=fusion), name="ptx")
        self._format = format
        self._weights = build_weights(self._config, self)

    def decode(self, num_seqs: int, context: int) -> list[ObservedLaunch]:
        """Run the decoder and draw greedily. ``context`` is how many tokens each sequence sees, its new one included.

        What advances a captured step to its next tokens, one launch more, is not in it.
        """
        before = len(self._device.observed)
        ops: Any = _Labelling(self.backend, self._device)
        logits = self._forward(ops, self._batch([1] * num_seqs, context), context)
        sampled = Sampled(self.backend.empty((num_seqs,), np.dtype(np.int32)))
        ops.sample(sampled, logits, self._sampling(num_seqs))
        return self._device.observed[before:]

    def prefill(self, num_tokens: int) -> list[ObservedLaunch]:
        """One prompt, up to its logits."""
        before = len(self._device.observed)
        batch = self._batch([num_tokens], num_tokens)
        self._forward(_Labelling(self.backend, self._device), batch, num_tokens)
        return self._device.observed[before:]

    def _forward(self, ops: Any, batch: Batch, context: int) -> Array:
        c = self._config
        shape = c.layers[0].attention
        num_blocks = batch.block_tables.shape[0] * batch.block_tables.shape[1]
        size = (num_blocks, shape.num_kv_heads, _BLOCK_SIZE, shape.head_dim)
        cache = KVCacheLayer(*(self._empty(size, self.backend.kv_cache_dtype, f"{KV} {of}") for of in "kv"))
        activations = Activations.allocate(c, batch.num_tokens, batch.num_logits, self.backend)
        decoder = Decoder(self._weights.with_rope(build_rope_tables(c, context, self.backend)))
        decoder.forward(ops, batch, (cache,), activations)
        return activations.logits

    # ---- zeros of the right shape ------------------------------------------------------------------------------------

    def matrix(self, tensor: Tensor) -> Weight:
        kind, (rows, columns) = WEIGHT, tensor.shape
        if tensor.name == "embed_tokens":
            kind, rows = TABLE, _TABLE_ROWS
        data = np.zeros((rows, self._format.row_bytes(columns)), np.uint8)
        stored = StoredTensor(tensor.name, self._format, (rows, columns), data)
        return self.backend.load_weight(f"{kind} {tensor.name}", [stored])

    def vector(self, tensor: Tensor) -> CudaArray:
        return CudaArray.owning(self._device, self._device.upload(np.ones(tensor.shape, np.float32), VECTOR))

    def _empty(self, size: tuple[int, ...], dtype: np.dtype[Any], name: str) -> CudaArray:
        return CudaArray.owning(self._device, self._device.empty(size, dtype, name))

    def _batch(self, query_lens: list[int], context: int) -> Batch:
        """Sequences of one context, the last tokens of each in the step."""
        num_seqs, num_tokens, upload = len(query_lens), sum(query_lens), self.backend.upload
        blocks = -(-context // _BLOCK_SIZE)
        positions = np.concatenate([np.arange(context - length, context) for length in query_lens])
        return Batch(
            token_ids=upload(np.zeros(num_tokens, np.int32)),
            positions=upload(positions.astype(np.int32)),
            slot_mapping=upload(positions.astype(np.int32)),
            cu_seqlens_q=upload(np.cumsum([0, *query_lens]).astype(np.int32)),
            context_lens=upload(np.full(num_seqs, context, np.int32)),
            block_tables=upload(np.arange(num_seqs * blocks, dtype=np.int32).reshape(num_seqs, blocks)),
            logit_rows=upload((np.cumsum(query_lens) - 1).astype(np.int32)),
            num_tokens=num_tokens,
            num_seqs=num_seqs,
            num_logits=num_seqs,
            max_query_len=max(query_lens),
            max_context_len=context,
        )

    def _sampling(self, num_seqs: int) -> Sampling:
        def zeros(dtype: type[np.generic], size: int = num_seqs) -> Array:
            return self.backend.upload(np.zeros(size, dtype))

        return Sampling(
            temperature=zeros(np.float32),
            top_k=zeros(np.int32),
            top_p=self.backend.upload(np.ones(num_seqs, np.float32)),
            min_p=zeros(np.float32),
            repetition_penalty=zeros(np.float32),
            presence_penalty=zeros(np.float32),
            frequency_penalty=zeros(np.float32),
            seed=zeros(np.uint64),
            output_index=zeros(np.uint32),
            history_begins=zeros(np.int32),
            history_ends=zeros(np.int32),
            history=zeros(np.int32, 0),
            history_prompt_lens=zeros(np.int32),
            bias_begins=zeros(np.int32),
            bias_ends=zeros(np.int32),
            bias_token_ids=zeros(np.int32, 0),
            bias_values=zeros(np.float32, 0),
            changes_logits=False,
        )


class _Labelling:
    """A backend that tells the device which op is called."""

    def __init__(self, backend: CudaBackend, device: ObservingDevice, within: str = "") -> None:
        self._backend = backend
        self._device = device
        self._within = within
        """Begins all labels."""

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)

        if name in OPS and OPS[name].is_fused and not self._backend.fuses(OPS[name]):
            after_layers = _Labelling(self._backend, self._device, f"{name} ")
            return partial(OPS[name].compose, self if OPS[name].place.is_in_layer else after_layers)

        def call(*args: Any) -> Any:
            weight = next((arg.name for arg in args if isinstance(arg, Weight)), "")
            label = f"{name} {weight.removeprefix(WEIGHT).strip()}" if name == "linear_add" else name
            self._device.label = self._within + label
            return method(*args)

        return call if callable(method) else method
