"""ModelRunner: turns a scheduled step into arrays, runs the decoder on them and draws the next tokens."""

from __future__ import annotations

from numba_engine.backends.base import Backend, KVCacheLayer, Sampled
from numba_engine.config import EngineConfig
from numba_engine.execution.batch import build_batch, build_sampling_batch
from numba_engine.model.activations import Activations
from numba_engine.model.config import ModelConfig
from numba_engine.model.decoder import Decoder
from numba_engine.scheduling.scheduler import ScheduledStep


class ModelRunner:
    """Owns the decoder, the KV cache arrays and the activation buffers."""

    def __init__(
        self,
        model: ModelConfig,
        decoder: Decoder,
        kv_cache: tuple[KVCacheLayer, ...],
        config: EngineConfig,
        backend: Backend,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._block_size = config.block_size
        max_logits = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._activations = Activations.allocate(model, config.max_num_batched_tokens, max_logits, backend)

    def execute(self, step: ScheduledStep, ops: Backend) -> Sampled | None:
        """Run the step; a token for each of its sequences that wants one, in the step's order. None if none does."""
        batch = build_batch(step, self._block_size, ops)
        activations = self._activations.rows(batch.num_tokens, batch.num_logits)
        self._decoder.forward(ops, batch, self._kv_cache, activations)
        if batch.num_logits == 0:
            return None
        drawing = [scheduled.sequence for scheduled in step if scheduled.wants_token]
        return ops.sample(activations.logits, build_sampling_batch(drawing, ops))
