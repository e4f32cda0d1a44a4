"""ModelWeights: every tensor the decoder reads, in the backend's memory, and how a checkpoint becomes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from numba_engine.backends.arrays import Array, Norm, RopeTable, Weight
from numba_engine.backends.base import Backend
from numba_engine.backends.layers import Attention, GatedMlp, Layer
from numba_engine.checkpoint import Checkpoint, Progress
from numba_engine.errors import CheckpointError
from numba_engine.formats import StoredTensor, dequantize, is_finite
from numba_engine.model.config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """``lm_head`` is ``embed_tokens`` itself when the model ties them."""

    embed_tokens: Weight  # [vocab, hidden]
    layers: tuple[Layer, ...]
    final_norm: Norm  # [hidden]
    lm_head: Weight  # [vocab, hidden]

    def with_rope(self, table: RopeTable) -> ModelWeights:
        """With layers that rotate by the table, which is as long as the longest context: known once weights are loaded
        and memory is divided."""
        layers = (replace(layer, attention=replace(layer.attention, rope=table)) for layer in self.layers)
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


def load_weights(
    checkpoint: Checkpoint, config: ModelConfig, backend: Backend, progress: Progress | None = None
) -> ModelWeights:
    """Check every tensor of a checkpoint and hand it to the backend, giving the file's memory back as it goes.

    Matrices stay in the format the file stores them in. The largest, embedding and head, are loaded first, while little
    else is resident.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the config asks for, holds NaN or infinity, or is
            not part of the architecture although it would change the output.
    """
    loader = _Loader(checkpoint, config, backend, progress)
    loader.check_names_and_shapes()
    embed_tokens = loader.matrix("embed_tokens", "embed_tokens")
    lm_head = embed_tokens if config.tie_word_embeddings else loader.matrix("lm_head", "lm_head")
    attention = attention_of(config)
    layers = tuple(_load_layer(loader, config, attention, f"layers.{i}.") for i in range(config.num_layers))
    return ModelWeights(embed_tokens, layers, loader.norm("final_norm"), lm_head)


def attention_of(config: ModelConfig) -> Attention:
    """Of every layer, without the table of its rotation."""
    return Attention(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        window=config.sliding_window,
    )


def _load_layer(loader: _Loader, config: ModelConfig, attention: Attention, layer: str) -> Layer:
    return Layer(
        attention=attention,
        attn_norm=loader.norm(layer + "attn_norm"),
        qkv_proj=loader.matrix(layer + "qkv_proj", layer + "q_proj", layer + "k_proj", layer + "v_proj"),
        qkv_bias=loader.vector(layer + "qkv_bias", layer + "q_bias", layer + "k_bias", layer + "v_bias")
        if config.has_qkv_bias
        else None,
        q_norm=loader.norm(layer + "q_norm") if config.has_qk_norm else None,
        k_norm=loader.norm(layer + "k_norm") if config.has_qk_norm else None,
        o_proj=loader.matrix(layer + "o_proj", layer + "o_proj"),
        mlp=GatedMlp(
            norm=loader.norm(layer + "mlp_norm"),
            gate_up_proj=loader.matrix(layer + "gate_up_proj", layer + "gate_proj", layer + "up_proj"),
            activation="silu",
            down_proj=loader.matrix(layer + "down_proj", layer + "down_proj"),
        ),
    )


class _Loader:
    """Brings tensors, by our names, from the checkpoint to the backend."""

    def __init__(
        self, checkpoint: Checkpoint, config: ModelConfig, backend: Backend, progress: Progress | None
    ) -> None:
        self._checkpoint = checkpoint
        self._config = config
        self._backend = backend
        self._progress = progress
        self._shapes = _expected_shapes(config)
        self._bytes_done = 0
        self._bytes_total = 0

    def check_names_and_shapes(self) -> None:
        """Before anything is loaded: the checkpoint has just the tensors of the architecture, in the right shapes."""
        for name, shape in self._shapes.items():
            tensor = self._stored(name)
            if tensor.shape != shape:
                raise self._error(f"has shape {tensor.shape}, the config asks for {shape}", tensor.name)
            self._bytes_total += tensor.nbytes
        known = {self._file_name(name) for name in self._shapes}
        for name in self._checkpoint.tensors:
            if name not in known and not self._is_harmless(name):
                raise self._error(
                    f"is not part of a {self._config.architecture} model of {self._config.num_layers} layers with this "
                    "config; without it the output would be wrong",
                    name,
                )

    def matrix(self, name: str, *parts: str) -> Weight:
        """A weight whose rows are those of the parts, one after the other."""
        tensors = [self._checked(part) for part in parts]
        ordered = [
            replace(tensor, data=self._in_rotate_half_order(tensor.data, part))
            for part, tensor in zip(parts, tensors, strict=True)
        ]
        weight = self._backend.load_weight(name, ordered)
        self._done(name, tensors)
        return weight

    def norm(self, name: str) -> Norm:
        return Norm(self.vector(name), self._config.rms_norm_eps)

    def vector(self, name: str, *parts: str) -> Array:
        """Norm weights or biases, as float32; several parts are laid end to end."""
        parts = parts or (name,)
        tensors = [self._checked(part) for part in parts]
        values = [
            self._in_rotate_half_order(dequantize(tensor), part) for part, tensor in zip(parts, tensors, strict=True)
        ]
        array = self._backend.upload(np.concatenate(values))
        self._done(name, tensors)
        return array

    def _checked(self, name: str) -> StoredTensor:
        tensor = self._stored(name)
        if not is_finite(tensor):
            where = "scale" if tensor.format.is_quantized else "value"
            raise self._error(f"holds a {where} that is NaN or infinite ({tensor.format.name})", tensor.name)
        return tensor

    def _in_rotate_half_order(self, rows: np.ndarray, name: str) -> np.ndarray:
        """Undo llama.cpp's row order of q and k, which its architecture ``llama`` rotates in neighbouring pairs.

        There, rows 2i and 2i + 1 of a head are rows i and i + D/2 of the Hugging Face order. Rows move whole, so they
        may be the stored bytes.
        """
        interleaved = self._checkpoint.kind == "gguf" and self._config.architecture == "llama"
        if not interleaved or name.rpartition(".")[2] not in ("q_proj", "k_proj", "q_bias", "k_bias"):
            return rows
        pairs = rows.reshape(-1, self._config.head_dim // 2, 2, *rows.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)

    def _done(self, name: str, tensors: Sequence[StoredTensor]) -> None:
        for tensor in tensors:
            self._bytes_done += tensor.nbytes
            self._checkpoint.release(tensor)
        if self._progress is not None:
            self._progress(name, self._bytes_done, self._bytes_total)

    def _stored(self, name: str) -> StoredTensor:
        file_name = self._file_name(name)
        tensor = self._checkpoint.tensors.get(file_name)
        if tensor is None:
            raise self._error("is missing", file_name)
        return tensor

    def _file_name(self, name: str) -> str:
        return (_gguf_name if self._checkpoint.kind == "gguf" else _hf_name)(name)

    def _is_harmless(self, file_name: str) -> bool:
        """Tensors that hold what the config says already, or that a tied model does not use."""
        if self._checkpoint.kind == "gguf":
            return file_name == "rope_freqs.weight"
        return file_name.endswith(".rotary_emb.inv_freq") or (
            file_name == "lm_head.weight" and self._config.tie_word_embeddings
        )

    def _error(self, message: str, tensor: str) -> CheckpointError:
        return CheckpointError(message, file=self._checkpoint.file_of(tensor), tensor=tensor)


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the architecture, by our name."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q_proj": (q_size, hidden),
        "k_proj": (kv_size, hidden),
        "v_proj": (kv_size, hidden),
        "o_proj": (hidden, q_size),
        "mlp_norm": (hidden,),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    if config.has_qkv_bias:
        layer |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
    if config.has_qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (config.vocab_size, hidden), "final_norm": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    return shapes


_HF_NAMES = {
    "embed_tokens": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o_proj": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}
_GGUF_NAMES = {
    "embed_tokens": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attn_norm": "attn_norm.weight",
    "q_proj": "attn_q.weight",
    "k_proj": "attn_k.weight",
    "v_proj": "attn_v.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o_proj": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate_proj": "ffn_gate.weight",
    "up_proj": "ffn_up.weight",
    "down_proj": "ffn_down.weight",
}


def _hf_name(name: str) -> str:
    prefix, _, kind = name.rpartition(".")
    return f"model.{prefix}.{_HF_NAMES[kind]}" if prefix else _HF_NAMES[kind]


def _gguf_name(name: str) -> str:
    prefix, _, kind = name.rpartition(".")
    return f"{prefix.replace('layers', 'blk')}.{_GGUF_NAMES[kind]}" if prefix else _GGUF_NAMES[kind]
