"""Rotary position embedding tables (Su et al. 2021, "RoFormer"), with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math

import numpy as np

from numba_engine.backends.arrays import RopeTable
from numba_engine.backends.base import Backend
from numba_engine.model.config import LayerConfig, Llama3RopeScaling, ModelConfig, RopeFrequencyDivisors, RopeParameters


def build_rope_tables(config: ModelConfig, max_model_len: int, backend: Backend) -> tuple[RopeTable | None, ...]:
    """Of each layer; layers that rotate alike share one."""
    tables: dict[tuple[RopeParameters, int], RopeTable] = {}

    def table_of(layer: LayerConfig) -> RopeTable | None:
        if layer.rope is None:
            return None
        key = (layer.rope, layer.attention.head_dim)
        if key not in tables:
            tables[key] = _table(*key, max_model_len, backend)
        return tables[key]

    return tuple(table_of(layer) for layer in config.layers)


def _table(rope: RopeParameters, head_dim: int, max_model_len: int, backend: Backend) -> RopeTable:
    """cos and sin of positions 0 … max_model_len - 1: float64 rounded to float32, ``[max_model_len, D / 2]``."""
    angles = np.outer(np.arange(max_model_len, dtype=np.float64), inverse_frequencies(rope, head_dim))
    return RopeTable(
        cos=backend.upload(np.cos(angles).astype(np.float32)), sin=backend.upload(np.sin(angles).astype(np.float32))
    )


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> np.ndarray:
    """Radians per position of each of the D / 2 rotated pairs, float64."""
    pairs = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = rope.theta**-pairs
    match rope.scaling:
        case Llama3RopeScaling() as scaling:
            frequencies = _scale_llama3(frequencies, scaling)
        case RopeFrequencyDivisors(divisors):
            frequencies = frequencies / np.array(divisors)
    return frequencies


def _scale_llama3(frequencies: np.ndarray, scaling: Llama3RopeScaling) -> np.ndarray:
    """Slow rotations are stretched by ``factor``, fast ones kept, those between blended (Llama 3.1 model card code)."""
    rotations = scaling.original_max_position * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((rotations - scaling.low_freq_factor) / span, 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor
