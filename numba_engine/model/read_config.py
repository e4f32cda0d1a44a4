"""What a checkpoint says of its model: its shape, checked, and how its makers would sample."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from numba_engine.checkpoint import Checkpoint
from numba_engine.errors import CheckpointError
from numba_engine.model.config import LayerConfig, ModelConfig
from numba_engine.model.fields import MAX_SIZE, is_number
from numba_engine.model.gguf_config import config_from_gguf
from numba_engine.model.hf_config import config_from_huggingface


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """From config.json and generation_config.json, or the metadata of a GGUF file.

    Raises:
        CheckpointError: a number is missing, of the wrong type, out of range, or contradicts another.
        UnsupportedModelError: the model needs something the engine does not have.
    """
    if checkpoint.kind == "gguf":
        config, file = config_from_gguf(checkpoint), checkpoint.path
    else:
        config, file = config_from_huggingface(checkpoint), checkpoint.path / "config.json"
    for layer in dict.fromkeys(config.layers):
        _check_agreement(layer, str(file))
    return config


def _check_agreement(layer: LayerConfig, file: str) -> None:
    shape = layer.attention
    if shape.num_heads % shape.num_kv_heads:
        raise CheckpointError(
            f"{shape.num_heads} attention heads cannot share {shape.num_kv_heads} key-value heads evenly", file=file
        )
    if shape.head_dim % 2:
        raise CheckpointError(f"head_dim = {shape.head_dim} must be even, since RoPE rotates pairs", file=file)
    if shape.num_heads * shape.head_dim > MAX_SIZE:
        raise CheckpointError(
            f"{shape.num_heads} heads of {shape.head_dim} are wider than the limit of {MAX_SIZE}", file=file
        )


def default_sampling(checkpoint: Checkpoint) -> dict[str, Any]:
    """Arguments of SamplingParams that the model's makers recommend; what is absurd is left out.

    From generation_config.json, or the ``general.sampling.*`` metadata of a GGUF file.
    """
    gguf = checkpoint.kind == "gguf"
    source = checkpoint.config if gguf else checkpoint.generation_config
    result: dict[str, Any] = {}
    for name, (kind, low, high, gguf_key) in _SAMPLING_RANGES.items():
        value = source.get(gguf_key if gguf else name)
        if is_number(value) and isinstance(value, kind) and low <= value <= high:
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
