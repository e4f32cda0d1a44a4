"""A whole decode step of a real model, looked at launch by launch without a GPU.

One layer of real shape runs through the real decoder on a device that runs samples of each launch
(``backends/cuda/observed.py``); the other layers launch the same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from numba_engine.backends.base import Array, Batch, KVCacheLayer, LayerWeights, SamplingBatch, Weight
from numba_engine.backends.cuda.arrays import CudaArray
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.device import Device
from numba_engine.backends.cuda.observed import ObservedLaunch, ObservingDevice
from numba_engine.backends.ptx.counters import SECTOR_BYTES
from numba_engine.config import EngineConfig
from numba_engine.model.activations import Activations
from numba_engine.model.config import ModelConfig
from numba_engine.model.decoder import Decoder, attention_shape
from numba_engine.model.rope import build_rope_table
from numba_engine.model.weights import ModelWeights
from numba_engine.profiling.forward_traffic import ForwardTraffic, TensorBits
from numba_engine.profiling.kernel_model import ISSUE_PER_CLOCK, KernelWork, ModelledGpu, Prediction, predict
from numba_engine.storage import StorageFormat, StoredTensor

_BLOCK_SIZE = 16
_KV, _WEIGHT = "kv", "weight"
"""How the names of their arrays begin."""


def _llama(hidden: int, intermediate: int, layers: int, heads: int, head_dim: int, *, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        vocab_size=128256,
        max_position=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=None,
        sliding_window=None,
        has_qkv_bias=False,
        has_qk_norm=False,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_ids=(),
    )


MODELS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "llama-3-8b": _llama(4096, 14336, 32, 32, 128, tied=False),
        "llama-3.2-1b": _llama(2048, 8192, 16, 32, 64, tied=True),
    }
)
"""Shapes of Meta's config.json."""


@dataclass(frozen=True, slots=True)
class StepLaunch:
    """A launch, and how often the step has it. Bytes are of one launch and each counted once."""

    op: str
    observed: ObservedLaunch
    count: int
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    """Of everything between the ops, which L2 holds."""

    @property
    def memory_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def instructions_per_weight_byte(self) -> float | None:
        """Of warps, machine code."""
        if not self.weight_bytes:
            return None
        return self.observed.executed.instructions * self.observed.scale / self.weight_bytes

    def work(self) -> KernelWork:
        observed, counters = self.observed, self.observed.counters
        scale, done = observed.scale, observed.executed
        return KernelWork(
            num_blocks=observed.num_blocks,
            threads=observed.kernel.threads,
            registers=observed.assembled.registers,
            shared_bytes=observed.shared_bytes,
            memory_bytes=self.memory_bytes,
            cache_bytes=counters.sectors * SECTOR_BYTES * scale,
            instructions=done.instructions * scale,
            by_unit={unit: number * scale for unit, number in done.by_pipe.items()},
            shared_wavefronts=counters.shared_wavefronts * scale,
            tensor_flops=observed.tensor_flops * scale,
            bytes_in_flight=done.bytes_in_flight,
        )


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """One token for each of ``num_seqs`` sequences."""

    model: str
    format: StorageFormat
    num_seqs: int
    context: int
    launches: tuple[StepLaunch, ...]
    once_bytes: float
    """Weights, KV and activations, each once (``profiling/traffic.py``)."""

    @property
    def num_launches(self) -> int:
        return sum(launch.count for launch in self.launches)

    @property
    def moved_bytes(self) -> int:
        """What memory moves if no launch finds weights or KV in a cache; activations as well."""
        return sum(launch.count * (launch.memory_bytes + launch.activation_bytes) for launch in self.launches)

    @property
    def moved_over_once(self) -> float:
        return self.moved_bytes / self.once_bytes

    @property
    def bank_conflict_factor(self) -> float:
        """Wavefronts of shared memory over the fewest."""
        done = ideal = 0.0
        for launch in self.launches:
            scale = launch.count * launch.observed.scale
            done += scale * launch.observed.counters.shared_wavefronts
            ideal += scale * launch.observed.counters.shared_wavefronts_ideal
        return done / ideal if ideal else 1.0

    @property
    def spill_bytes(self) -> int:
        kernels = {launch.observed.kernel.name: launch.observed.assembled.spill_bytes for launch in self.launches}
        return sum(kernels.values())

    @property
    def instructions_per_weight_byte(self) -> float:
        """Of warps, machine code: all instructions of the launches that stream weights, over those."""
        streaming = [launch for launch in self.launches if launch.weight_bytes > 1 << 20]
        instructions = sum(
            launch.count * launch.observed.executed.instructions * launch.observed.scale for launch in streaming
        )
        return instructions / sum(launch.count * launch.weight_bytes for launch in streaming)

    def predictions(self, gpu: ModelledGpu, *, graph: bool = True) -> list[Prediction]:
        """One a launch of ``launches``."""
        return [predict(launch.work(), gpu, graph=graph) for launch in self.launches]

    def time_s(self, gpu: ModelledGpu, *, graph: bool = True) -> float:
        predictions = self.predictions(gpu, graph=graph)
        return sum(launch.count * p.time_s for launch, p in zip(self.launches, predictions, strict=True))

    def memory_share(self, gpu: ModelledGpu, *, graph: bool = True) -> float:
        """Weights and KV over the time, of the datasheet's bandwidth."""
        nbytes = sum(launch.count * launch.memory_bytes for launch in self.launches)
        return nbytes / self.time_s(gpu, graph=graph) / gpu.bandwidth

    def issue_sum(self, gpu: ModelledGpu) -> IssueSum:
        return IssueSum(self.instructions_per_weight_byte, gpu.bytes_per_clock)


@dataclass(frozen=True, slots=True)
class IssueSum:
    """Whether a multiprocessor can issue all instructions while weights come in at the full bandwidth."""

    instructions_per_byte: float
    bytes_per_clock: float

    @property
    def slots(self) -> float:
        """Warp instructions a clock, of 4."""
        return self.instructions_per_byte * self.bytes_per_clock

    @property
    def fits(self) -> bool:
        return self.slots <= ISSUE_PER_CLOCK

    def __str__(self) -> str:
        return (
            f"{self.instructions_per_byte:.4f} warp instructions a weight byte × {self.bytes_per_clock:.1f} bytes a"
            f" clock and multiprocessor = {self.slots:.2f} of {ISSUE_PER_CLOCK:g} issue slots"
        )


def observe_decode(
    model: str,
    format: StorageFormat,
    cc: tuple[int, int],
    *,
    num_seqs: int = 1,
    context: int = 512,
    fusion: bool = True,
) -> DecodeStep:
    """Look at a decode step of one of ``MODELS`` on a device of that compute capability. Some seconds.

    ``context`` is how many tokens each sequence sees, its new one included. Raises BackendUnavailableError without
    ptxas.
    """
    config = MODELS[model]
    device = ObservingDevice(cc)
    backend = CudaBackend(device, EngineConfig(kv_cache_dtype="float16", fusion=fusion), name="ptx")
    _run_step(backend, device, config, format, num_seqs, context)
    launches = tuple(
        _step_launch(observed, 1 if observed.label in _ONCE else config.num_layers) for observed in device.observed
    )
    return DecodeStep(model, format, num_seqs, context, launches, _once_bytes(config, format, num_seqs, context))


_ONCE = frozenset({"advance", "embedding", "norm_lm_head", "draw"})
"""Every other op runs in each layer."""


def _run_step(
    backend: CudaBackend,
    device: ObservingDevice,
    config: ModelConfig,
    format: StorageFormat,
    num_seqs: int,
    context: int,
) -> None:
    """As ``execution/decode_graphs.py`` has it: move on, run the decoder, draw."""
    layer, head = (
        _layer(backend, config, format),
        _matrix(backend, "lm_head", config.vocab_size, config.hidden_size, format),
    )
    weights = ModelWeights(
        embed_tokens=head, layers=(layer,), final_norm=_vector(device, config.hidden_size), lm_head=head
    )
    decoder = Decoder(weights, build_rope_table(config, context, backend), attention_shape(config))
    blocks = -(-context // _BLOCK_SIZE)
    batch, sampling = _batch(backend, num_seqs, context, blocks), _sampling(backend, num_seqs)
    size = (num_seqs * blocks, config.num_kv_heads, _BLOCK_SIZE, config.head_dim)
    cache = KVCacheLayer(*(CudaArray.owning(device, device.empty(size, np.float16, f"{_KV} {of}")) for of in "kv"))
    activations = Activations.allocate(config, num_seqs, num_seqs, backend)
    drawn = backend.upload(np.zeros(num_seqs, np.int32))
    ops: Any = _Labelling(backend, device)
    ops.advance(batch, sampling.output_index, drawn, _BLOCK_SIZE)
    decoder.forward(ops, batch, (cache,), activations)
    ops.draw(drawn, activations.logits, sampling)


class _Labelling:
    """A backend that tells the device which op is called."""

    def __init__(self, backend: CudaBackend, device: ObservingDevice) -> None:
        self._backend = backend
        self._device = device

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._backend, name)

        def call(*args: Any) -> Any:
            weight = next((arg.name for arg in args if isinstance(arg, Weight)), "")
            self._device.label = f"{name} {weight.removeprefix(_WEIGHT).strip()}" if name == "linear_add" else name
            return method(*args)

        return call if callable(method) else method


def _step_launch(observed: ObservedLaunch, count: int) -> StepLaunch:
    kinds = dict.fromkeys((_WEIGHT, _KV, ""), 0)
    for name, nbytes in observed.array_bytes().items():
        kinds[next(kind for kind in kinds if name.startswith(kind))] += nbytes
    return StepLaunch(observed.label, observed, count, *kinds.values())


def _once_bytes(config: ModelConfig, format: StorageFormat, num_seqs: int, context: int) -> float:
    bits = format.block_bytes * 8 / format.block_size
    counted = ForwardTraffic(config, TensorBits(bits, bits, bits, 32), num_seqs, 1, context)
    total = counted.without_attention() + counted.attention()
    # Counted at a byte a key or value and two bytes an activation; here they are float16 and float32.
    kv_bytes = 2 * (total.kv_read_bytes + total.kv_written_bytes)
    activation_bytes = 2 * (total.activation_read_bytes + total.activation_written_bytes)
    return total.weight_bytes + kv_bytes + activation_bytes


# ---- zeros of the right shape ----------------------------------------------------------------------------------------


def _layer(backend: CudaBackend, config: ModelConfig, format: StorageFormat) -> LayerWeights:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim

    def matrix(name: str, rows: int, columns: int) -> Weight:
        return _matrix(backend, name, rows, columns, format)

    return LayerWeights(
        input_norm=_vector(backend.device, config.hidden_size),
        qkv_proj=matrix("qkv_proj", q_size + 2 * kv_size, config.hidden_size),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        o_proj=matrix("o_proj", config.hidden_size, q_size),
        post_attention_norm=_vector(backend.device, config.hidden_size),
        gate_up_proj=matrix("gate_up_proj", 2 * config.intermediate_size, config.hidden_size),
        down_proj=matrix("down_proj", config.hidden_size, config.intermediate_size),
    )


def _matrix(backend: CudaBackend, name: str, rows: int, columns: int, format: StorageFormat) -> Weight:
    data = np.zeros((rows, format.row_bytes(columns)), np.uint8)
    return backend.load_weight(f"{_WEIGHT} {name}", [StoredTensor(name, format, (rows, columns), data)])


def _vector(device: Device, size: int) -> CudaArray:
    return CudaArray.owning(device, device.upload(np.ones(size, np.float32), f"{_WEIGHT} norm"))


def _batch(backend: CudaBackend, num_seqs: int, context: int, blocks: int) -> Batch:
    """Before ``advance``, one token short of the context."""

    def column(value: int) -> Array:
        return backend.upload(np.full(num_seqs, value, np.int32))

    return Batch(
        token_ids=column(0),
        positions=column(context - 2),
        slot_mapping=column(0),
        cu_seqlens_q=backend.upload(np.arange(num_seqs + 1, dtype=np.int32)),
        context_lens=column(context - 1),
        block_tables=backend.upload(np.arange(num_seqs * blocks, dtype=np.int32).reshape(num_seqs, blocks)),
        logit_rows=backend.upload(np.arange(num_seqs, dtype=np.int32)),
        num_tokens=num_seqs,
        num_seqs=num_seqs,
        num_logits=num_seqs,
        max_query_len=1,
        max_context_len=context,
    )


def _sampling(backend: CudaBackend, num_seqs: int) -> SamplingBatch:
    """Greedy."""

    def zeros(dtype: type[np.generic], size: int = num_seqs) -> Array:
        return backend.upload(np.zeros(size, dtype))

    return SamplingBatch(
        temperature=zeros(np.float32),
        top_k=zeros(np.int32),
        top_p=backend.upload(np.ones(num_seqs, np.float32)),
        min_p=zeros(np.float32),
        repetition_penalty=zeros(np.float32),
        presence_penalty=zeros(np.float32),
        frequency_penalty=zeros(np.float32),
        seed=zeros(np.uint64),
        output_index=zeros(np.uint32),
        history_offsets=zeros(np.int32, num_seqs + 1),
        history=zeros(np.int32, 0),
        history_prompt_lens=zeros(np.int32),
        bias_offsets=zeros(np.int32, num_seqs + 1),
        bias_token_ids=zeros(np.int32, 0),
        bias_values=zeros(np.float32, 0),
        num_logits=num_seqs,
        num_top_logprobs=-1,
    )
