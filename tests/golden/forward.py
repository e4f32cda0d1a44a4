"""One forward pass, with the logits of any position: the layer below ``LLM``, which hands out at most 20 of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from numba_engine.backends import create_backend
from numba_engine.backends.arrays import Batch
from numba_engine.backends.base import Backend
from numba_engine.checkpoint import open_checkpoint
from numba_engine.config import EngineConfig
from numba_engine.execution.kv_cache import allocate_kv_cache
from numba_engine.model.activations import Activations
from numba_engine.model.config import ModelConfig
from numba_engine.model.decoder import Decoder
from numba_engine.model.loading import load_weights
from numba_engine.model.read_config import read_config
from numba_engine.model.rope import build_rope_tables
from numba_engine.model.weights import ModelWeights


class Forward:
    """A model that runs one prompt at a time, of at most ``max_tokens``, and keeps nothing between them."""

    def __init__(
        self, model: ModelConfig, weights: ModelWeights, backend: Backend, config: EngineConfig, *, max_tokens: int
    ) -> None:
        self.backend = backend
        self.config = config
        self.model_config = model
        self.decoder = Decoder(weights.with_rope(build_rope_tables(model, max_tokens, backend)))
        self.num_blocks = -(-max_tokens // config.block_size)
        self.kv_cache = allocate_kv_cache(model, config, self.num_blocks, backend)

    @classmethod
    def load(cls, path: Path, config: EngineConfig, *, max_tokens: int) -> Forward:
        backend = create_backend(config)
        with open_checkpoint(str(path)) as checkpoint:
            model = read_config(checkpoint)
            weights = load_weights(checkpoint, model, backend)
        return cls(model, weights, backend, config, max_tokens=max_tokens)

    def logits(self, token_ids: Sequence[int], rows: Sequence[int] = (-1,)) -> np.ndarray:
        """Next-token logits after the tokens at ``rows``, float32 ``[rows, vocab]``."""
        num_tokens = len(token_ids)
        wanted = sorted(row % num_tokens for row in rows)
        upload = self.backend.upload
        positions = np.arange(num_tokens, dtype=np.int32)
        blocks = np.arange(self.num_blocks, dtype=np.int32)[::-1]  # any order must do
        slots = (
            blocks[positions // self.config.block_size] * self.config.block_size + positions % self.config.block_size
        )
        batch = Batch(
            token_ids=upload(np.array(token_ids, dtype=np.int32)),
            positions=upload(positions),
            slot_mapping=upload(slots.astype(np.int32)),
            cu_seqlens_q=upload(np.array([0, num_tokens], dtype=np.int32)),
            context_lens=upload(np.array([num_tokens], dtype=np.int32)),
            block_tables=upload(np.ascontiguousarray(blocks[None])),
            logit_rows=upload(np.array(wanted, dtype=np.int32)),
            num_tokens=num_tokens,
            num_seqs=1,
            num_logits=len(wanted),
            max_query_len=num_tokens,
            max_context_len=num_tokens,
        )
        activations = Activations.allocate(self.model_config, num_tokens, len(wanted), self.backend)
        self.decoder.forward(self.backend, batch, self.kv_cache, activations)
        return self.backend.download(activations.logits)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Along the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
