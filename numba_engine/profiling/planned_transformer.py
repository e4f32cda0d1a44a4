"""A planned model whose shapes are known, from a config or a checkpoint."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from numba_engine.checkpoint import Checkpoint, TensorHeader
from numba_engine.errors import CheckpointError, ConfigError
from numba_engine.model.config import LayerConfig, ModelConfig
from numba_engine.model.read_config import read_config
from numba_engine.profiling.forward_traffic import TensorBits, forward_traffic, model_bytes
from numba_engine.profiling.hardware import NumberFormat, stored_format
from numba_engine.profiling.planned_model import Demand, shares_kv_heads
from numba_engine.profiling.workload import Workload


@dataclass(frozen=True, slots=True)
class Transformer:
    """A model whose shapes are known, from a config or a checkpoint."""

    name: str
    config: ModelConfig
    stored: StoredWeights | None = None
    """None where there is no checkpoint: then the workload says how weights are stored."""

    @property
    def num_parameters(self) -> int:
        return model_bytes(self.config, TensorBits(8, 8, 8, 8))

    @property
    def max_position(self) -> int | None:
        return self.config.max_position

    def weight_format(self, workload: Workload) -> NumberFormat:
        if workload.weights is not None:
            return workload.weights
        if self.stored is None:
            raise ConfigError("a config says nothing of how the weights are stored; give a weight format")
        return self.stored.format

    def demand(self, workload: Workload, query_len: int) -> Demand:
        shard = self._shard(workload.tp)
        context = max(workload.context, query_len)
        counted = forward_traffic(shard, self._bits(workload), workload.batch, query_len, context)
        rest, attention = counted.without_attention, counted.attention
        total = rest + attention
        return Demand(
            weight_bytes=float(total.weight_bytes),
            kv_bytes=workload.kv.nbytes(total.kv_read_bytes + total.kv_written_bytes),  # counted at a byte a value
            activation_bytes=float(total.activation_read_bytes + total.activation_written_bytes),
            matrix_flops=float(rest.flops),
            attention_flops=float(attention.flops),
            all_reduce_bytes=2.0 * workload.batch * query_len * shard.hidden_size,
            num_all_reduces=2 * shard.num_layers if workload.tp > 1 else 0,
        )

    def resident_weight_bytes(self, workload: Workload) -> float:
        return float(model_bytes(self._shard(workload.tp), self._bits(workload)))

    def kv_bytes_per_token(self, workload: Workload) -> float:
        c = self._shard(workload.tp)
        return workload.kv.nbytes(c.kv_values_per_token)

    def score_bytes(self, workload: Workload) -> float:
        c = self._shard(workload.tp)
        num_heads = sum(layer.attention.num_heads for layer in c.layers)
        return 2.0 * workload.batch * workload.context**2 * num_heads

    def can_be_shared(self, tp: int) -> bool:
        return all(_can_be_shared(layer, tp) for layer in self.config.layers)

    def _shard(self, tp: int) -> ModelConfig:
        """What one GPU has of the model. KV heads are repeated where there are more GPUs than heads."""
        c = self.config
        shards = {layer: _shard_of_layer(layer, tp) for layer in dict.fromkeys(c.layers)}
        layers = tuple(shards[layer] for layer in c.layers)
        return replace(c, layers=layers, vocab_size=-(-c.vocab_size // tp))

    def _bits(self, workload: Workload) -> TensorBits:
        if workload.weights is None and self.stored is not None:
            return self.stored.bits
        bits = self.weight_format(workload).bits
        vectors = 32.0 if bits < 16 else bits  # quantised models keep norms and biases in float32
        return TensorBits(bits, bits, bits, vectors)


def _can_be_shared(layer: LayerConfig, tp: int) -> bool:
    shape = layer.attention
    return shape.num_heads % tp == 0 and layer.intermediate_size % tp == 0 and shares_kv_heads(shape.num_kv_heads, tp)


def _shard_of_layer(layer: LayerConfig, tp: int) -> LayerConfig:
    shape = layer.attention
    if not _can_be_shared(layer, tp):
        raise ConfigError(
            f"tp = {tp} must divide {shape.num_heads} heads and intermediate_size {layer.intermediate_size}, and divide"
            f" or be a multiple of {shape.num_kv_heads} KV heads"
        )
    shard = replace(shape, num_heads=shape.num_heads // tp, num_kv_heads=max(1, shape.num_kv_heads // tp))
    return replace(layer, attention=shard, intermediate_size=layer.intermediate_size // tp)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """How a checkpoint stores its tensors: what a mixture of formats comes to."""

    format: NumberFormat
    """Named after all of its formats; arithmetic of the one that has most bytes."""
    bits: TensorBits


def transformer_from_config(config: Mapping[str, Any], name: str) -> Transformer:
    """Shapes alone, from the values of a config.json. Raises ConfigError for what the engine cannot run."""
    checkpoint = Checkpoint("hf", Path(name), name=name, config=config, generation_config={}, tensors={})
    try:
        return Transformer(name, read_config(checkpoint))
    except CheckpointError as error:
        raise ConfigError(str(error).removeprefix(f"{checkpoint.path / 'config.json'}: ")) from None


def transformer_from_checkpoint(checkpoint: Checkpoint) -> Transformer:
    """Shapes and stored bytes of an open checkpoint; of its tensors only the headers are looked at."""
    return transformer_from_headers(checkpoint.name, read_config(checkpoint), checkpoint.headers)


def transformer_from_headers(name: str, config: ModelConfig, headers: Sequence[TensorHeader]) -> Transformer:
    """The same of a checkpoint that may be closed by now."""
    table = (config.vocab_size, config.hidden_size)
    nbytes, num_values, by_label = Counter[str](), Counter[str](), Counter[str]()
    for tensor in headers:
        if len(tensor.shape) < 2:
            group = "vectors"
        elif tensor.shape == table:
            group = "embed_tokens" if "embd" in tensor.name or "embed" in tensor.name else "lm_head"
        else:
            group = "matrices"
        nbytes[group] += tensor.nbytes
        num_values[group] += math.prod(tensor.shape)
        if group != "vectors":
            by_label[tensor.format.name] += tensor.nbytes
    groups = ("embed_tokens", "lm_head", "matrices", "vectors")
    bits = TensorBits(*(8 * nbytes[group] / max(num_values[group], 1) for group in groups))
    labels = [label for label, _ in by_label.most_common()]
    format = replace(stored_format(labels[0]), name=", ".join(labels), bits=bits.matrices)
    return Transformer(name, config, StoredWeights(format, bits))
