"""ModelWeights: a model as the decoder takes it, every tensor in the backend's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from numba_engine.backends.arrays import Array, Norm, RopeTable, Weight
from numba_engine.backends.layers import GatedMlp, Layer
from numba_engine.model.config import ModelConfig
from numba_engine.model.tensors import Tensor, layer_tensors, model_tensors


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """``lm_head`` is ``embed_tokens`` itself when the model ties them."""

    embed_tokens: Weight  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: Norm  # [hidden]
    lm_head: Weight  # [vocab, hidden]
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None

    def with_rope(self, tables: Sequence[RopeTable | None]) -> ModelWeights:
        """With layers that rotate by their tables (``build_rope_tables``), as long as the longest context: known once
        weights are loaded and memory is divided."""
        layers = (
            replace(layer, attention=replace(layer.attention, rope=table))
            for layer, table in zip(self.layers, tables, strict=True)
        )
        return replace(self, layers=tuple(layers))

    @property
    def matrices(self) -> tuple[Weight, ...]:
        """Every matrix once: a tied head is not counted again."""
        head = () if self.lm_head is self.embed_tokens else (self.lm_head,)
        return (self.embed_tokens, *(weight for layer in self.layers for weight in layer.matrices.values()), *head)

    @property
    def vectors(self) -> tuple[Array, ...]:
        """Norm weights and biases."""
        return (*(vector for layer in self.layers for vector in layer.vectors), self.final_norm.weight)

    @property
    def num_parameters(self) -> int:
        return sum(w.shape[0] * w.shape[1] for w in self.matrices) + sum(v.shape[0] for v in self.vectors)

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.matrices) + sum(vector.nbytes for vector in self.vectors)

    @property
    def bytes_per_token(self) -> dict[str, int]:
        """What a pass of one token reads, by kind: every matrix, norm and bias once, and its row of the embedding."""
        by_kind: Counter[str] = Counter()
        for layer in self.layers:
            by_kind.update({name: weight.nbytes for name, weight in layer.matrices.items()})
        return {
            "embed_tokens": self.embed_tokens.nbytes // self.embed_tokens.shape[0],
            **by_kind,
            "lm_head": self.lm_head.nbytes,
            "norms and biases": sum(vector.nbytes for vector in self.vectors),
        }

    @property
    def format_names(self) -> tuple[str, ...]:
        """Storage formats of the matrices, the one with most bytes first."""
        nbytes: Counter[str] = Counter()
        for segment in (segment for weight in self.matrices for segment in weight.segments):
            nbytes[segment.format.name] += segment.nbytes
        return tuple(label for label, _ in nbytes.most_common())


class TensorSource(Protocol):
    """Where the tensors of a model come from."""

    def matrix(self, tensor: Tensor) -> Weight: ...
    def vector(self, tensor: Tensor) -> Array: ...


def build_weights(config: ModelConfig, source: TensorSource) -> ModelWeights:
    """A model of what the source has. The largest tensors, embedding and head, are asked for first, while little else
    is in memory."""
    tensors = model_tensors(config)
    embed_tokens = source.matrix(tensors["embed_tokens"])
    return ModelWeights(
        embed_tokens=embed_tokens,
        lm_head=embed_tokens if config.tie_word_embeddings else source.matrix(tensors["lm_head"]),
        layers=tuple(_build_layer(config, i, source) for i in range(config.num_layers)),
        final_norm=Norm(source.vector(tensors["final_norm"]), config.rms_norm_eps),
        embedding_scale=config.embedding_scale,
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap,
    )


def _build_layer(config: ModelConfig, index: int, source: TensorSource) -> Layer:
    layer, tensors = config.layers[index], layer_tensors(config, index)

    def norm(name: str) -> Norm:
        return Norm(source.vector(tensors[name]), config.rms_norm_eps)

    def norm_if_any(name: str) -> Norm | None:
        return norm(name) if name in tensors else None

    return Layer(
        attention=layer.attention,
        attn_norm=norm("attn_norm"),
        qkv_proj=source.matrix(tensors["qkv_proj"]),
        qkv_bias=source.vector(tensors["qkv_bias"]) if "qkv_bias" in tensors else None,
        q_norm=norm_if_any("q_norm"),
        k_norm=norm_if_any("k_norm"),
        o_proj=source.matrix(tensors["o_proj"]),
        attn_out_norm=norm_if_any("attn_out_norm"),
        mlp=GatedMlp(
            norm=norm("mlp_norm"),
            gate_up_proj=source.matrix(tensors["gate_up_proj"]),
            activation=layer.activation,
            down_proj=source.matrix(tensors["down_proj"]),
            out_norm=norm_if_any("mlp_out_norm"),
        ),
        residual_scale=layer.residual_scale,
    )
