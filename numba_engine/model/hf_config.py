"""ModelConfig from config.json and generation_config.json. The only place that knows their keys."""

from __future__ import annotations

from collections.abc import Mapping

from numba_engine.backends.layers import Attention
from numba_engine.checkpoint import Checkpoint
from numba_engine.errors import UnsupportedModelError
from numba_engine.model.config import QK_NORMS, QKV_BIAS, LayerConfig, Llama3RopeScaling, ModelConfig, RopeParameters
from numba_engine.model.fields import (
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_SIZE,
    MAX_VOCAB_SIZE,
    Fields,
    supported,
)

_HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
_DEFAULT_NUM_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # those of transformers; llama's is num_heads
_DEFAULT_MAX_POSITION = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}


def config_from_huggingface(checkpoint: Checkpoint) -> ModelConfig:
    """Where config.json leaves a key out, transformers' default for the architecture stands."""
    fields = Fields(checkpoint.config, str(checkpoint.path / "config.json"))
    architecture = _hf_architecture(fields)
    _refuse_hf_variants(fields)
    num_heads = fields.integer("num_attention_heads", 1, MAX_SIZE)
    hidden_size = fields.integer("hidden_size", 1, MAX_SIZE)
    num_layers = fields.integer("num_hidden_layers", 1, MAX_LAYERS)
    if fields.get("num_key_value_heads") is None and "num_key_value_heads" in fields.values:
        num_kv_heads = num_heads
    else:
        default = _DEFAULT_NUM_KV_HEADS.get(architecture, num_heads)
        num_kv_heads = fields.integer("num_key_value_heads", 1, MAX_SIZE, default)
    if fields.get("head_dim") is None and architecture != "qwen3" and hidden_size % num_heads:
        raise fields.error(f"hidden_size = {hidden_size} is not a multiple of num_attention_heads = {num_heads}")
    default_head_dim = 128 if architecture == "qwen3" else hidden_size // num_heads
    rope = _hf_rope(fields)
    vocab_size = fields.integer("vocab_size", 1, MAX_VOCAB_SIZE)
    generation = Fields(checkpoint.generation_config, str(checkpoint.path / "generation_config.json"))
    bos = [*fields.token_ids("bos_token_id", vocab_size), *generation.token_ids("bos_token_id", vocab_size)]
    eos = [*generation.token_ids("eos_token_id", vocab_size), *fields.token_ids("eos_token_id", vocab_size)]
    head_dim = fields.integer("head_dim", 2, MAX_HEAD_DIM, default_head_dim)
    intermediate_size = fields.integer("intermediate_size", 1, MAX_SIZE)
    optional_tensors = {"qwen2": QKV_BIAS, "qwen3": QK_NORMS}.get(architecture, frozenset())
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        layers=tuple(
            LayerConfig(
                attention=Attention(num_heads, num_kv_heads, head_dim, head_dim**-0.5, window),
                rope=rope,
                intermediate_size=intermediate_size,
                optional_tensors=optional_tensors,
            )
            for window in _hf_windows(fields, architecture, num_layers)
        ),
        vocab_size=vocab_size,
        max_position=fields.integer("max_position_embeddings", 2, MAX_POSITION, _DEFAULT_MAX_POSITION[architecture]),
        rms_norm_eps=fields.number("rms_norm_eps", 0.0, 1.0, 1e-6),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def _hf_architecture(fields: Fields) -> str:
    names, model_type = fields.get("architectures"), fields.get("model_type")
    if not isinstance(model_type, str | None):
        raise fields.error(f"model_type must be a name, got {model_type!r:.80}")
    if names is None and model_type is not None:
        model_types = {name: name for name in _HF_ARCHITECTURES.values()}
        return supported("model_type", model_type, model_types, fields.file)
    if not isinstance(names, list) or len(names) != 1:
        raise fields.error(f"architectures must be a list of one name, got {names!r:.80}")
    return supported("architectures", names[0], _HF_ARCHITECTURES, fields.file)


def _refuse_hf_variants(fields: Fields) -> None:
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


def _hf_rope(fields: Fields) -> RopeParameters:
    """From ``rope_theta`` and ``rope_scaling`` or from the newer ``rope_parameters``."""
    key = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    section = fields.get(key) or {}
    if not isinstance(section, Mapping):
        raise fields.error(f"{key} must be an object, got {section!r:.80}")
    if any(isinstance(value, Mapping) for value in section.values()):
        raise UnsupportedModelError(key, dict(section), "one set of parameters for all layers", file=fields.file)
    rope = Fields(section, fields.file, section=f"{key}.")
    theta = (rope if rope.get("rope_theta") is not None else fields).number("rope_theta", 1.0, 1e15, 10000.0)
    for where in (rope, fields):
        rotated = where.number("partial_rotary_factor", 0.0, 1.0, 1.0)
        if rotated != 1.0:
            raise UnsupportedModelError("partial_rotary_factor", rotated, "1.0", file=fields.file)
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type == "default":
        return RopeParameters(theta)
    if rope_type != "llama3":
        raise UnsupportedModelError(f"{key}.rope_type", rope_type, "default, llama3", file=fields.file)
    scaling = Llama3RopeScaling(
        factor=rope.number("factor", 1.0, 1e6),
        low_freq_factor=rope.number("low_freq_factor", 1e-3, 1e6),
        high_freq_factor=rope.number("high_freq_factor", 1e-3, 1e6),
        original_max_position=rope.integer("original_max_position_embeddings", 1, MAX_POSITION),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.error(
            f"{key}.high_freq_factor = {scaling.high_freq_factor} must exceed "
            f"low_freq_factor = {scaling.low_freq_factor}"
        )
    return RopeParameters(theta, scaling)


def _hf_windows(fields: Fields, architecture: str, num_layers: int) -> list[int | None]:
    """The window of each layer; None for one that sees everything."""
    fields.integer("sliding_window", 0, MAX_POSITION, 0)  # also where it is switched off
    unlimited: list[int | None] = [None] * num_layers
    if architecture == "llama":
        return unlimited
    switched_off = "sliding_window" in fields.values and fields.get("sliding_window") is None
    if switched_off or (architecture != "mistral" and not fields.flag("use_sliding_window", False)):
        return unlimited
    window = fields.integer("sliding_window", 1, MAX_POSITION, 4096)
    if architecture == "mistral":
        return [window] * num_layers
    layer_types = fields.get("layer_types")
    if layer_types is None:
        first = fields.integer("max_window_layers", 0, MAX_LAYERS, 28)
        layer_types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise fields.error(f"layer_types must be a list of {num_layers} names, got {layer_types!r:.80}")
    windows = {"full_attention": None, "sliding_attention": window}
    if not all(isinstance(layer_type, str) and layer_type in windows for layer_type in layer_types):
        raise UnsupportedModelError("layer_types", layer_types, ", ".join(windows), file=fields.file)
    return [windows[layer_type] for layer_type in layer_types]
