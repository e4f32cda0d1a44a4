"""ModelConfig: the values that make a model; what varies by layer is a value of the layer."""

from __future__ import annotations

from dataclasses import dataclass

from numba_engine.backends.layers import Activation, Attention

QKV_BIAS = frozenset({"qkv_bias"})
QK_NORMS = frozenset({"q_norm", "k_norm"})
OUT_NORMS = frozenset({"attn_out_norm", "mlp_out_norm"})


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Llama 3.1's frequency-dependent stretch of RoPE (``rope_type: llama3``)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True)
class RopeFrequencyDivisors:
    """The same stretch as GGUF stores it (``rope_freqs.weight``): what each of the D/2 frequencies is divided by."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """How the q and k heads of a layer turn with their position."""

    theta: float
    scaling: Llama3RopeScaling | RopeFrequencyDivisors | None = None


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What one layer computes."""

    attention: Attention
    """Without the table of its rotation, which is as long as the longest context."""
    rope: RopeParameters | None
    """None where positions do not rotate q and k."""
    intermediate_size: int
    activation: Activation = "silu"
    optional_tensors: frozenset[str] = frozenset()
    """Those of ``QKV_BIAS``, ``QK_NORMS`` and ``OUT_NORMS`` that it has."""
    residual_scale: float = 1.0
    """What attention and mlp give is multiplied with it before it is added to the residual (Granite)."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer, checked: every number is positive and they agree."""

    architecture: str  # "llama", "mistral", "qwen2", "qwen3"
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    embedding_scale: float = 1.0
    """What rows of the embedding are multiplied with (Gemma)."""
    logit_scale: float = 1.0
    """What logits are multiplied with (Granite)."""
    logit_softcap: float | None = None
    """Logits x become softcap · tanh(x / softcap); None leaves them (Gemma 2)."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def kv_values_per_token(self) -> int:
        """Keys and values that a token has in the cache, in all layers."""
        return sum(2 * layer.attention.num_kv_heads * layer.attention.head_dim for layer in self.layers)
