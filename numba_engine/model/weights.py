"""ModelWeights: every tensor the decoder reads, in the backend's memory."""

from __future__ import annotations

from dataclasses import dataclass

from numba_engine.backends.base import Array, LayerWeights, Weight


@dataclass(frozen=True, slots=True, eq=False)
class ModelWeights:
    """``lm_head`` is ``embed_tokens`` itself when the model ties them."""

    embed_tokens: Weight  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: Array  # [hidden] float32
    lm_head: Weight  # [vocab, hidden]
