"""ModelRunner: turns a scheduled step into arrays, runs the decoder on them and samples the next tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from numba_engine.backends.arrays import Array, Batch, KVCacheLayer
from numba_engine.backends.base import Backend
from numba_engine.backends.capture import CaptureBackend
from numba_engine.config import EngineConfig
from numba_engine.execution.batch import build_batch
from numba_engine.execution.decode_graphs import DecodeGraphs
from numba_engine.execution.sampling import (
    SampledTokens,
    SamplingBuilder,
    download,
    empty_sampled,
    num_top_logprobs,
)
from numba_engine.model.activations import Activations
from numba_engine.model.config import ModelConfig
from numba_engine.model.decoder import Decoder
from numba_engine.scheduling.scheduler import ScheduledStep


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that is done, or will be without any further doing."""

    step: ScheduledStep
    wait: Callable[[], SampledTokens | None]
    """A token for each of the step's sequences that needs one, in the step's order; None if none does."""
    is_repeatable: bool
    """``ModelRunner.launch_again`` can run the next step before this one's tokens are seen."""


class ModelRunner:
    """Owns the decoder, the KV cache arrays, the activation buffers and the captured steps."""

    def __init__(
        self,
        model: ModelConfig,
        decoder: Decoder,
        kv_cache: tuple[KVCacheLayer, ...],
        config: EngineConfig,
        backend: Backend,
        max_model_len: int,
    ) -> None:
        self._backend = backend
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._block_size = config.block_size
        self._sampling = SamplingBuilder()
        max_logits = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._activations = Activations.allocate(model, config.max_num_batched_tokens, max_logits, backend)
        self._graphs: DecodeGraphs | None = None
        if config.graph and isinstance(backend, CaptureBackend):
            self._graphs = DecodeGraphs(
                backend,
                lambda batch: self._forward(batch, backend),
                self._activations.logits,
                max_rows=max_logits,
                max_blocks=-(-max_model_len // config.block_size),
                block_size=config.block_size,
            )

    def launch(self, step: ScheduledStep, ops: Backend) -> LaunchedStep:
        """Run the step with these ops: the backend, or what stands in its place and wants each op to itself.

        Where the step is one that the backend can replay, it goes on running after the call.
        """
        if self._graphs is not None and ops is self._backend and self._graphs.supports(step):
            return LaunchedStep(step, self._graphs.launch(step).wait, self._graphs.can_launch_again)
        sampled = self._execute(step, ops)
        return LaunchedStep(step, lambda: sampled, is_repeatable=False)

    def launch_again(self, launched: LaunchedStep) -> LaunchedStep:
        """Run the next step of the same sequences. The step must be the last one launched."""
        assert launched.is_repeatable
        assert self._graphs is not None
        return LaunchedStep(launched.step, self._graphs.launch_again().wait, is_repeatable=True)

    def capture_graphs(self) -> None:
        """Capture what can be captured."""
        if self._graphs is not None:
            self._graphs.capture_all()

    def _execute(self, step: ScheduledStep, ops: Backend) -> SampledTokens | None:
        batch = build_batch(step, self._block_size, ops)
        logits = self._forward(batch, ops)
        if batch.num_logits == 0:
            return None
        sequences = [scheduled.sequence for scheduled in step if scheduled.needs_sampling]
        num_top = num_top_logprobs([sequence.params for sequence in sequences])
        sampled = empty_sampled(len(sequences), num_top, ops)
        ops.sample(sampled, logits, self._sampling.build(sequences, ops))
        return download(sampled, ops)

    def _forward(self, batch: Batch, ops: Backend) -> Array:
        activations = self._activations.rows(batch.num_tokens, batch.num_logits)
        self._decoder.forward(ops, batch, self._kv_cache, activations)
        return activations.logits
