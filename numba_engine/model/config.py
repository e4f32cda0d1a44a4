"""ModelConfig: the numbers that make an architecture. The only place that knows Hugging Face and GGUF key names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from numba_engine.checkpoint import Checkpoint
from numba_engine.errors import CheckpointError, UnsupportedModelError
from numba_engine.formats import dequantize

_MAX_SIZE = 1 << 20  # of hidden_size and its like: far above any model, far below what could overflow a product
_MAX_LAYERS = 1 << 12
_MAX_HEAD_DIM = 1 << 10
_MAX_VOCAB_SIZE = 1 << 24
_MAX_POSITION = 1 << 21


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
class ModelConfig:
    """A decoder-only transformer of the Llama family, checked: every number is positive and they agree."""

    architecture: str  # "llama", "mistral", "qwen2", "qwen3"
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Llama3RopeScaling | RopeFrequencyDivisors | None
    sliding_window: int | None
    has_qkv_bias: bool
    has_qk_norm: bool
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> ModelConfig:
        """Read config.json and generation_config.json, or the metadata of a GGUF file.

        Raises:
            CheckpointError: a number is missing, of the wrong type, out of range, or contradicts another.
            UnsupportedModelError: the model needs something the engine does not have.
        """
        if checkpoint.kind == "gguf":
            return _checked_agreement(_from_gguf(checkpoint), str(checkpoint.path))
        return _checked_agreement(_from_huggingface(checkpoint), str(checkpoint.path / "config.json"))


def default_sampling(checkpoint: Checkpoint) -> dict[str, Any]:
    """Arguments of SamplingParams that the model's makers recommend; what is absurd is left out.

    From generation_config.json, or the ``general.sampling.*`` metadata of a GGUF file.
    """
    gguf = checkpoint.kind == "gguf"
    source = checkpoint.config if gguf else checkpoint.generation_config
    result: dict[str, Any] = {}
    for name, (kind, low, high, gguf_key) in _SAMPLING_RANGES.items():
        value = source.get(gguf_key if gguf else name)
        if _is_number(value) and isinstance(value, kind) and low <= value <= high:
            result[name] = value
    if source.get("do_sample") is False:
        result["temperature"] = 0.0
    return result


_TINY: Final = 1e-6  # stands for "greater than 0"
_SAMPLING_RANGES: Mapping[str, tuple[Any, float, float, str]] = {
    "temperature": (int | float, 0.0, 100.0, "general.sampling.temp"),
    "top_k": (int, 0, 2**31 - 1, "general.sampling.top_k"),
    "top_p": (int | float, _TINY, 1.0, "general.sampling.top_p"),
    "min_p": (int | float, 0.0, 1.0, "general.sampling.min_p"),
    "repetition_penalty": (int | float, _TINY, 10.0, "general.sampling.penalty_repeat"),
}
"""What SamplingParams accepts, and the key of a GGUF file."""


# ---- Hugging Face ----------------------------------------------------------------------------------------------------

_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULT_NUM_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # those of transformers; llama's is num_heads
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


def _from_huggingface(checkpoint: Checkpoint) -> ModelConfig:
    """Where config.json leaves a key out, transformers' default for the architecture stands."""
    fields = _Fields(checkpoint.config, str(checkpoint.path / "config.json"))
    architecture = _hf_architecture(fields)
    _refuse_hf_variants(fields)
    num_heads = fields.integer("num_attention_heads", 1, _MAX_SIZE)
    hidden_size = fields.integer("hidden_size", 1, _MAX_SIZE)
    num_layers = fields.integer("num_hidden_layers", 1, _MAX_LAYERS)
    if fields.get("num_key_value_heads") is None and "num_key_value_heads" in fields.values:
        num_kv_heads = num_heads
    else:
        default = _DEFAULT_NUM_KV_HEADS.get(architecture, num_heads)
        num_kv_heads = fields.integer("num_key_value_heads", 1, _MAX_SIZE, default)
    if fields.get("head_dim") is None and architecture != "qwen3" and hidden_size % num_heads:
        raise fields.error(f"hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}")
    default_head_dim = 128 if architecture == "qwen3" else hidden_size // num_heads
    rope_theta, rope_scaling = _hf_rope(fields)
    vocab_size = fields.integer("vocab_size", 1, _MAX_VOCAB_SIZE)
    generation = _Fields(checkpoint.generation_config, str(checkpoint.path / "generation_config.json"))
    bos = [*fields.token_ids("bos_token_id", vocab_size), *generation.token_ids("bos_token_id", vocab_size)]
    eos = [*generation.token_ids("eos_token_id", vocab_size), *fields.token_ids("eos_token_id", vocab_size)]
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size", 1, _MAX_SIZE),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=fields.integer("head_dim", 2, _MAX_HEAD_DIM, default_head_dim),
        vocab_size=vocab_size,
        max_position=fields.integer("max_position_embeddings", 2, _MAX_POSITION, _DEFAULT_MAX_POSITION[architecture]),
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        sliding_window=_hf_sliding_window(fields, architecture, num_layers),
        has_qkv_bias=architecture == "qwen2",
        has_qk_norm=architecture == "qwen3",
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def _hf_architecture(fields: _Fields) -> str:
    names, model_type = fields.get("architectures"), fields.get("model_type")
    if not isinstance(model_type, str | None):
        raise fields.error(f"model_type must be a name, got {model_type!r:.80}")
    if names is None and model_type is not None:
        model_types = {name: name for name in _HF_ARCHITECTURES.values()}
        return _supported("model_type", model_type, model_types, fields.file)
    if not isinstance(names, list) or len(names) != 1:
        raise fields.error(f"architectures must be a list of one name, got {names!r:.80}")
    return _supported("architectures", names[0], _HF_ARCHITECTURES, fields.file)


def _refuse_hf_variants(fields: _Fields) -> None:
    """Settings of these architectures that would change what the model computes, and are not implemented."""
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise UnsupportedModelError(
            "quantization_config.quant_method",
            method,
            "unquantised BF16, F16 and F32, or a GGUF file",
            file=fields.file,
        )
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError("hidden_act", activation, "silu", file=fields.file)
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name, False):
            raise UnsupportedModelError(name, True, "false", file=fields.file)


def _hf_rope(fields: _Fields) -> tuple[float, Llama3RopeScaling | None]:
    """theta and scaling, from ``rope_theta`` and ``rope_scaling`` or from the newer ``rope_parameters``."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    section = fields.get(key) or {}
    if not isinstance(section, Mapping):
        raise fields.error(f"{key} must be an object, got {section!r:.80}")
    if any(isinstance(value, Mapping) for value in section.values()):
        raise UnsupportedModelError(key, dict(section), "one set of parameters for all layers", file=fields.file)
    rope = _Fields(section, fields.file, section=f"{key}.")
    theta = (rope if rope.get("rope_theta") is not None else fields).number("rope_theta", 1.0, 1e15, 10000.0)
    for where in (rope, fields):
        rotated = where.number("partial_rotary_factor", 0.0, 1.0, 1.0)
        if rotated != 1.0:
            raise UnsupportedModelError("partial_rotary_factor", rotated, "1.0", file=fields.file)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        raise UnsupportedModelError(f"{key}.rope_type", rope_type, "default, llama3", file=fields.file)
    scaling = Llama3RopeScaling(
        factor=rope.number("factor", 1.0, 1e6),
        low_freq_factor=rope.number("low_freq_factor", 1e-3, 1e6),
        high_freq_factor=rope.number("high_freq_factor", 1e-3, 1e6),
        original_max_position=rope.integer("original_max_position_embeddings", 1, _MAX_POSITION),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.error(
            f"{key}.high_freq_factor = {scaling.high_freq_factor} must exceed "
            f"low_freq_factor = {scaling.low_freq_factor}"
        )
    return theta, scaling


def _hf_sliding_window(fields: _Fields, architecture: str, num_layers: int) -> int | None:
    """The window of every layer; None where all see everything. Layers that differ are not supported."""
    fields.integer("sliding_window", 0, _MAX_POSITION, 0)  # also where it is switched off
    if architecture == "llama":
        return None
    switched_off = "sliding_window" in fields.values and fields.get("sliding_window") is None
    if switched_off or (architecture != "mistral" and not fields.flag("use_sliding_window", False)):
        return None
    window = fields.integer("sliding_window", 1, _MAX_POSITION, 4096)
    if architecture == "mistral":
        return window
    layer_types = fields.get("layer_types")
    if layer_types is None:
        first = fields.integer("max_window_layers", 0, _MAX_LAYERS, 28)
        layer_types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise fields.error(f"layer_types must be a list of {num_layers} names, got {layer_types!r:.80}")
    if all(layer_type == "full_attention" for layer_type in layer_types):
        return None
    if all(layer_type == "sliding_attention" for layer_type in layer_types):
        return window
    raise UnsupportedModelError(
        "layer_types", layer_types, "the same kind of attention in every layer (full or sliding)", file=fields.file
    )


# ---- GGUF ------------------------------------------------------------------------------------------------------------

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

_END_OF_TURN_TOKENS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>")
"""Control tokens that llama.cpp ends generation at although no metadata key names them."""

_CONTROL_TOKEN = 3  # token_type of gguf.TokenType.CONTROL


def _from_gguf(checkpoint: Checkpoint) -> ModelConfig:
    file = str(checkpoint.path)
    metadata, tensors = checkpoint.config, checkpoint.tensors
    architecture = _supported("general.architecture", metadata.get("general.architecture"), _GGUF_ARCHITECTURES, file)
    fields = _Fields(metadata, file, key_prefix=f"{architecture}.")
    for name, neutral in _GGUF_NEUTRAL.items():
        if fields.get(name, neutral[0]) not in neutral:
            allowed = " or ".join(repr(value) for value in neutral)
            raise UnsupportedModelError(f"{architecture}.{name}", fields.get(name), allowed, file=file)
    num_layers = fields.integer("block_count", 1, _MAX_LAYERS)
    hidden_size = fields.integer("embedding_length", 1, _MAX_SIZE)
    num_heads = fields.same_in_every_layer("attention.head_count", num_layers)
    num_kv_heads = fields.same_in_every_layer("attention.head_count_kv", num_layers, num_heads)
    if fields.get("attention.key_length") is None and hidden_size % num_heads:
        raise fields.error(f"embedding_length = {hidden_size} is not a multiple of head_count = {num_heads}")
    head_dim = fields.integer("attention.key_length", 2, _MAX_HEAD_DIM, hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        size = fields.integer(name, 0, _MAX_HEAD_DIM, head_dim)
        if size != head_dim:
            raise UnsupportedModelError(f"{architecture}.{name}", size, f"head_dim = {head_dim}", file=file)
    vocab_size = _gguf_vocab_size(checkpoint)
    tokenizer = _Fields(metadata, file, key_prefix="tokenizer.ggml.")
    bos = tokenizer.token_ids("bos_token_id", vocab_size)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.same_in_every_layer("feed_forward_length", num_layers),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position=fields.integer("context_length", 2, _MAX_POSITION),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon", 0.0, 1.0),
        rope_theta=fields.number("rope.freq_base", 1.0, 1e15, 10000.0),
        rope_scaling=_gguf_rope_divisors(checkpoint, head_dim),
        sliding_window=fields.integer("attention.sliding_window", 0, _MAX_POSITION, 0) or None,
        has_qkv_bias="blk.0.attn_q.bias" in tensors,
        has_qk_norm=architecture == "qwen3",
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
    if vocab_size > _MAX_VOCAB_SIZE:
        raise CheckpointError(f"token_embd.weight has {vocab_size} rows; at most {_MAX_VOCAB_SIZE} are read", file=file)
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


def _gguf_eos_token_ids(tokenizer: _Fields, vocab_size: int) -> tuple[int, ...]:
    """The declared end tokens first, then those that llama.cpp recognises by their text."""
    ids: list[int] = []
    for name in ("eos_token_id", "eot_token_id", "eom_token_id"):
        ids += tokenizer.token_ids(name, vocab_size)
    tokens, types = tokenizer.get("tokens"), tokenizer.get("token_type")
    if isinstance(tokens, list) and isinstance(types, list):
        pairs = enumerate(zip(tokens, types, strict=False))
        ids += [i for i, (text, kind) in pairs if kind == _CONTROL_TOKEN and text in _END_OF_TURN_TOKENS]
    return tuple(dict.fromkeys(ids))


# ---- checks of both --------------------------------------------------------------------------------------------------


def _checked_agreement(config: ModelConfig, file: str) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise CheckpointError(
            f"{config.num_heads} attention heads cannot share {config.num_kv_heads} key-value heads evenly", file=file
        )
    if config.head_dim % 2:
        raise CheckpointError(f"head_dim = {config.head_dim} must be even, since RoPE rotates pairs", file=file)
    if config.num_heads * config.head_dim > _MAX_SIZE:
        raise CheckpointError(
            f"{config.num_heads} heads of {config.head_dim} are wider than the limit of {_MAX_SIZE}", file=file
        )
    return config


def _supported(field: str, value: object, names: Mapping[str, str], file: str) -> str:
    if isinstance(value, str) and value in names:
        return names[value]
    raise UnsupportedModelError(field, value, ", ".join(names), file=file)


_REQUIRED: Final = object()


class _Fields:
    """Typed, bounded reading of an unchecked mapping; errors name the file and the field."""

    def __init__(self, values: Mapping[str, Any], file: str, *, key_prefix: str = "", section: str = "") -> None:
        """``key_prefix`` begins every key of the mapping; ``section`` is where the mapping itself was found."""
        self.values = values
        self.file = file
        self._key_prefix = key_prefix
        self._label = section + key_prefix

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(message, file=self.file)

    def get(self, name: str, default: Any = None) -> Any:
        """The raw value; null and absent are the default."""
        value = self.values.get(self._key_prefix + name)
        return default if value is None else value

    def integer(self, name: str, low: int, high: int, default: object = _REQUIRED) -> int:
        value = self._value(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, value, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float, default: object = _REQUIRED) -> float:
        value = self._value(name, default)
        if not _is_number(value) or not low <= value <= high:
            raise self._wrong(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    def flag(self, name: str, default: object = _REQUIRED) -> bool:
        value = self._value(name, default)
        if type(value) is not bool:
            raise self._wrong(name, value, "true or false")
        return value

    def token_ids(self, name: str, vocab_size: int) -> list[int]:
        """A token id or a list of them; none where the field is null or absent."""
        value = self.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise self._wrong(name, value, f"a token id, or a list of them, below vocab_size = {vocab_size}")
        return ids

    def same_in_every_layer(self, name: str, num_layers: int, default: object = _REQUIRED) -> int:
        """A count, or a list of it per layer, as GGUF writes both."""
        value = self._value(name, default)
        if isinstance(value, list):
            if len(value) != num_layers:
                raise self._wrong(name, value, f"a count, or a list of {num_layers}")
            if any(other != value[0] for other in value):
                raise UnsupportedModelError(self._label + name, value, "the same in every layer", file=self.file)
            value = value[0]
        if type(value) is not int or not 1 <= value <= _MAX_SIZE:
            raise self._wrong(name, value, f"an integer from 1 to {_MAX_SIZE}")
        return value

    def _value(self, name: str, default: object) -> Any:
        value = self.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise self.error(f"{self._label}{name} is missing")
        return default

    def _wrong(self, name: str, value: object, allowed: str) -> CheckpointError:
        return self.error(f"{self._label}{name} must be {allowed}, got {value!r:.80}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond float
        return False
