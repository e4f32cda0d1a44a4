"""ModelConfig from the metadata of a GGUF file. The only place that knows its keys."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from numba_engine.backends.layers import Attention
from numba_engine.checkpoint import Checkpoint
from numba_engine.checkpoint.end_tokens import END_TOKEN_TEXTS
from numba_engine.errors import CheckpointError, UnsupportedModelError
from numba_engine.formats import dequantize
from numba_engine.model.config import (
    QK_NORMS,
    QKV_BIAS,
    LayerConfig,
    ModelConfig,
    RopeFrequencyDivisors,
    RopeParameters,
)
from numba_engine.model.fields import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_SIZE,
    MAX_VOCAB_SIZE,
    Fields,
    supported,
)

_GGUF_ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}

_GGUF_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "attention.sliding_window_pattern": (0,),
    "attention.temperature_scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.type": ("none", "linear"),  # linear by its factor, below
    "rope.scaling.factor": (0.0, 1.0),
    "rope.scale_linear": (0.0, 1.0),
    "use_parallel_residual": (False,),
}
"""Keys that change what these architectures compute, with the values that do not."""


def config_from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    file = str(checkpoint.path)
    metadata, tensors = checkpoint.config, checkpoint.tensors
    architecture = supported("general.architecture", metadata.get("general.architecture"), _GGUF_ARCHITECTURES, file)
    fields = Fields(metadata, file, key_prefix=f"{architecture}.")
    for name, neutral in _GGUF_NEUTRAL.items():
        if fields.get(name, neutral[0]) not in neutral:
            allowed = " or ".join(repr(value) for value in neutral)
            raise UnsupportedModelError(f"{architecture}.{name}", fields.get(name), allowed, file=file)
    num_layers = fields.integer("block_count", 1, MAX_LAYERS)
    hidden_size = fields.integer("embedding_length", 1, MAX_SIZE)
    num_heads = fields.counts("attention.head_count", num_layers)
    num_kv_heads = fields.counts("attention.head_count_kv", num_layers, num_heads)
    if fields.get("attention.key_length") is None and hidden_size % num_heads[0]:
        raise fields.error(f"embedding_length = {hidden_size} is not a multiple of head_count = {num_heads[0]}")
    head_dim = fields.integer("attention.key_length", 2, MAX_HEAD_DIM, hidden_size // num_heads[0])
    for name in ("attention.value_length", "rope.dimension_count"):
        size = fields.integer(name, 0, MAX_HEAD_DIM, head_dim)
        if size != head_dim:
            raise UnsupportedModelError(f"{architecture}.{name}", size, f"head_dim = {head_dim}", file=file)
    vocab_size = _gguf_vocab_size(checkpoint)
    tokenizer = Fields(metadata, file, key_prefix="tokenizer.ggml.")
    bos = tokenizer.token_ids("bos_token_id", vocab_size)
    intermediate_sizes = fields.counts("feed_forward_length", num_layers)
    window = fields.integer("attention.sliding_window", 0, MAX_POSITION, 0) or None
    rope = RopeParameters(
        fields.number("rope.freq_base", 1.0, 1e15, 10000.0), _gguf_rope_divisors(checkpoint, head_dim)
    )
    qkv_bias = QKV_BIAS if "blk.0.attn_q.bias" in tensors else frozenset()
    optional_tensors = qkv_bias | (QK_NORMS if architecture == "qwen3" else frozenset())
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        layers=tuple(
            LayerConfig(
                attention=Attention(heads, kv_heads, head_dim, head_dim**-0.5, window),
                rope=rope,
                intermediate_size=intermediate_size,
                optional_tensors=optional_tensors,
            )
            for heads, kv_heads, intermediate_size in zip(num_heads, num_kv_heads, intermediate_sizes, strict=True)
        ),
        vocab_size=vocab_size,
        max_position=fields.integer("context_length", 2, MAX_POSITION),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=_gguf_eos_token_ids(tokenizer, vocab_size),
    )


def _gguf_vocab_size(checkpoint: Checkpoint) -> int:
    """Rows of the embedding; the token list, which the tokenizer is made of, has as many."""
    file = str(checkpoint.path)
    embedding = checkpoint.tensors.get("token_embd.weight")
    if embedding is None:
        raise CheckpointError("is missing", file=file, tensor="token_embd.weight")
    vocab_size = embedding.shape[0]
    tokens = checkpoint.config.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != vocab_size:
        raise CheckpointError(
            f"tokenizer.ggml.tokens has {len(tokens)} tokens, token_embd.weight {vocab_size} rows", file=file
        )
    if vocab_size > MAX_VOCAB_SIZE:
        raise CheckpointError(f"token_embd.weight has {vocab_size} rows; at most {MAX_VOCAB_SIZE} are read", file=file)
    return vocab_size


def _gguf_rope_divisors(checkpoint: Checkpoint, head_dim: int) -> RopeFrequencyDivisors | None:
    """How llama.cpp's converter writes llama3 scaling: worked out, as a tensor."""
    name = "rope_freqs.weight"
    tensor = checkpoint.tensors.get(name)
    if tensor is None:
        return None
    file = str(checkpoint.path)
    if tensor.shape != (head_dim // 2,):
        raise CheckpointError(f"has shape {tensor.shape}, head_dim asks for {(head_dim // 2,)}", file=file, tensor=name)
    divisors = dequantize(tensor)
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise CheckpointError("must hold positive numbers", file=file, tensor=name)
    return RopeFrequencyDivisors(tuple(divisors.tolist()))


def _gguf_eos_token_ids(tokenizer: Fields, vocab_size: int) -> tuple[int, ...]:
    """The declared end tokens first, then those that llama.cpp recognises by their text, whatever their type."""
    ids: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ids += tokenizer.token_ids(name, vocab_size)
    tokens = tokenizer.get("tokens")
    if isinstance(tokens, list):
        ids += [token_id for token_id, text in enumerate(tokens) if text in END_TOKEN_TEXTS]
    return tuple(dict.fromkeys(ids))
