"""The tensors of a model, described once: our names, shapes, and where a checkpoint keeps them.

What a checkpoint must hold, how it is loaded, how many bytes a model has and what stands in for its weights where there
is no checkpoint, all derive from here.
"""

from __future__ import annotations

from dataclasses import dataclass

from numba_engine.model.config import OUT_NORMS, QK_NORMS, QKV_BIAS, ModelConfig


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor as a checkpoint stores it."""

    hf_name: str
    gguf_name: str
    shape: tuple[int, ...]
    num_rotated_heads: int = 0
    """Heads whose rows RoPE rotates in pairs: some GGUF files order these otherwise."""

    def name(self, kind: str) -> str:
        """In a checkpoint of a kind."""
        return self.gguf_name if kind == "gguf" else self.hf_name


@dataclass(frozen=True, slots=True)
class Tensor:
    """A matrix or a vector of a model: the rows of its parts, one after the other."""

    name: str
    parts: tuple[StoredPart, ...]
    layer: int | None = None

    @property
    def full_name(self) -> str:
        return self.name if self.layer is None else f"layers.{self.layer}.{self.name}"

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])


def tensors_of(config: ModelConfig) -> tuple[Tensor, ...]:
    """All, those of the model first."""
    return (
        *model_tensors(config).values(),
        *(tensor for i in range(config.num_layers) for tensor in layer_tensors(config, i).values()),
    )


def model_tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Those outside of layers, by name; a tied head has none of its own."""
    table, hidden = (config.vocab_size, config.hidden_size), (config.hidden_size,)
    parts = {
        "embed_tokens": StoredPart("model.embed_tokens.weight", "token_embd.weight", table),
        "final_norm": StoredPart("model.norm.weight", "output_norm.weight", hidden),
    }
    if not config.tie_word_embeddings:
        parts["lm_head"] = StoredPart("lm_head.weight", "output.weight", table)
    return {name: Tensor(name, (part,)) for name, part in parts.items()}


def layer_tensors(config: ModelConfig, index: int) -> dict[str, Tensor]:
    """Those of a layer, by name."""
    layer, hidden = config.layers[index], config.hidden_size
    shape, intermediate = layer.attention, layer.intermediate_size
    heads, kv_heads, head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
    q_size, kv_size = heads * head_dim, kv_heads * head_dim

    def part(hf_name: str, gguf_name: str, *size: int, rotated: int = 0) -> StoredPart:
        return StoredPart(f"model.layers.{index}.{hf_name}", f"blk.{index}.{gguf_name}", size, rotated)

    # Where norms follow attention and mlp too, Hugging Face calls the one after attention as others call the mlp's.
    has_out_norms = layer.optional_tensors >= OUT_NORMS
    mlp_norm = "pre_feedforward_layernorm" if has_out_norms else "post_attention_layernorm"
    every = {
        "attn_norm": [part("input_layernorm.weight", "attn_norm.weight", hidden)],
        "qkv_proj": [
            part("self_attn.q_proj.weight", "attn_q.weight", q_size, hidden, rotated=heads),
            part("self_attn.k_proj.weight", "attn_k.weight", kv_size, hidden, rotated=kv_heads),
            part("self_attn.v_proj.weight", "attn_v.weight", kv_size, hidden),
        ],
        "qkv_bias": [
            part("self_attn.q_proj.bias", "attn_q.bias", q_size, rotated=heads),
            part("self_attn.k_proj.bias", "attn_k.bias", kv_size, rotated=kv_heads),
            part("self_attn.v_proj.bias", "attn_v.bias", kv_size),
        ],
        "q_norm": [part("self_attn.q_norm.weight", "attn_q_norm.weight", head_dim)],
        "k_norm": [part("self_attn.k_norm.weight", "attn_k_norm.weight", head_dim)],
        "o_proj": [part("self_attn.o_proj.weight", "attn_output.weight", hidden, q_size)],
        "attn_out_norm": [part("post_attention_layernorm.weight", "post_attention_norm.weight", hidden)],
        "mlp_norm": [part(f"{mlp_norm}.weight", "ffn_norm.weight", hidden)],
        "gate_up_proj": [
            part("mlp.gate_proj.weight", "ffn_gate.weight", intermediate, hidden),
            part("mlp.up_proj.weight", "ffn_up.weight", intermediate, hidden),
        ],
        "down_proj": [part("mlp.down_proj.weight", "ffn_down.weight", hidden, intermediate)],
        "mlp_out_norm": [part("post_feedforward_layernorm.weight", "post_ffw_norm.weight", hidden)],
    }
    missing = (QKV_BIAS | QK_NORMS | OUT_NORMS) - layer.optional_tensors
    return {name: Tensor(name, tuple(parts), index) for name, parts in every.items() if name not in missing}
