"""Rotary position embedding tables (Su et al. 2021, "RoFormer"), with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math

import numpy as np

from numba_engine.backends.arrays import RopeTable
from numba_engine.backends.base import Backend
from numba_engine.model.config import Llama3RopeScaling, ModelConfig, RopeFrequencyDivisors


def build_rope_table(config: ModelConfig, max_model_len: int, backend: Backend) -> RopeTable:
    """cos and sin of positions 0 … max_model_len - 1: float64 rounded to float32, ``[max_model_len, D / 2]``."""
    angles = np.outer(np.arange(max_model_len, dtype=np.float64), inverse_frequencies(config))
    return RopeTable(
        cos=backend.upload(np.cos(angles).astype(np.float32)), sin=backend.upload(np.sin(angles).astype(np.float32))
    )


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each of the D / 2 rotated pairs, float64."""
    pairs = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-pairs
    match config.rope_scaling:
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
