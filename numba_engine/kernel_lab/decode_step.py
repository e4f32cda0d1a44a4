"""A whole step of a real model, looked at launch by launch without a GPU, and how long it should take on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba_engine.backends.base import OPS
from numba_engine.backends.ptx.counters import SECTOR_BYTES
from numba_engine.backends.traffic import Traffic
from numba_engine.formats import Format
from numba_engine.kernel_lab.kernel_model import ISSUE_PER_CLOCK, KernelWork, ModelledGpu, Prediction, predict
from numba_engine.kernel_lab.observed import ObservedLaunch, ObservingDevice
from numba_engine.kernel_lab.observed_model import KV, MODELS, TABLE, VECTOR, WEIGHT, ObservedModel
from numba_engine.model.config import ModelConfig
from numba_engine.profiling.forward_traffic import TensorBits, forward_traffic

MAX_LAUNCHES_PER_LAYER, MAX_OTHER_LAUNCHES = 5, 4
MAX_MOVED_OVER_ONCE = 1.02
MAX_BANK_CONFLICTS = 1.02


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
class ModelStep:
    """One token for each of ``num_seqs`` sequences, or a prompt."""

    model: str
    num_layers: int
    format: Format
    num_seqs: int
    query_len: int
    """1: decode."""
    context: int
    launches: tuple[StepLaunch, ...]
    once_bytes: float
    """Weights, KV and activations, each once (``profiling/traffic.py``)."""
    flops: float
    """By the same formulas."""

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.query_len

    @property
    def is_decode(self) -> bool:
        return self.query_len == 1

    @property
    def num_launches(self) -> int:
        """With the one that advances a captured step to its next tokens."""
        return sum(launch.count for launch in self.launches) + 1

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

    def tokens_per_s(self, gpu: ModelledGpu) -> float:
        return self.num_tokens / self.time_s(gpu)

    def memory_share(self, gpu: ModelledGpu, *, graph: bool = True) -> float:
        """Weights and KV over the time, of the datasheet's bandwidth."""
        nbytes = sum(launch.count * launch.memory_bytes for launch in self.launches)
        return nbytes / self.time_s(gpu, graph=graph) / gpu.bandwidth

    def issue_sum(self, gpu: ModelledGpu) -> IssueSum:
        return IssueSum(self.instructions_per_weight_byte, gpu.bytes_per_clock)

    def misses(self, gpu: ModelledGpu) -> tuple[str, ...]:
        """The targets this step does not reach; those of launches, bytes and issue slots are of decode."""
        most = MAX_LAUNCHES_PER_LAYER * self.num_layers + MAX_OTHER_LAUNCHES
        checks = (
            ("launches", not self.is_decode or self.num_launches <= most),
            ("bytes", not self.is_decode or self.moved_over_once <= MAX_MOVED_OVER_ONCE),
            ("bank conflicts", self.bank_conflict_factor <= MAX_BANK_CONFLICTS),
            ("spills", self.spill_bytes == 0),
            ("issue slots", not self.is_decode or self.issue_sum(gpu).fits),
        )
        return tuple(name for name, reached in checks if not reached)


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
    format: Format,
    cc: tuple[int, int],
    *,
    num_seqs: int = 1,
    context: int = 512,
    fusion: bool = True,
) -> ModelStep:
    """Look at a decode step of one of ``MODELS`` on a device of that compute capability. Some seconds.

    ``context`` is how many tokens each sequence sees, its new one included. Raises BackendUnavailableError without
    ptxas.
    """
    config = MODELS[model]
    launches = ObservedModel(ObservingDevice(cc), config, format, fusion=fusion).decode(num_seqs, context)
    return _model_step(model, format, launches, num_seqs, 1, context)


def observe_prefill(
    model: str, format: Format, cc: tuple[int, int], *, num_tokens: int, fusion: bool = True
) -> ModelStep:
    """As ``observe_decode``, one prompt up to its logits."""
    launches = ObservedModel(ObservingDevice(cc), MODELS[model], format, fusion=fusion).prefill(num_tokens)
    return _model_step(model, format, launches, 1, num_tokens, num_tokens)


def _model_step(
    model: str,
    format: Format,
    launches: Sequence[ObservedLaunch],
    num_seqs: int,
    query_len: int,
    context: int,
) -> ModelStep:
    config = MODELS[model]
    counted = tuple(_step_launch(launch, _count(launch, config.num_layers)) for launch in launches)
    once = _traffic(config, format, num_seqs, query_len, context)
    # Counted at a byte a key or value and two bytes an activation; here they are float16 and float32.
    kv_bytes = 2 * (once.kv_read_bytes + once.kv_written_bytes)
    activation_bytes = 2 * (once.activation_read_bytes + once.activation_written_bytes)
    return ModelStep(
        *(model, config.num_layers, format, num_seqs, query_len, context, counted),
        once_bytes=once.weight_bytes + kv_bytes + activation_bytes,
        flops=once.flops,
    )


def _count(launch: ObservedLaunch, num_layers: int) -> int:
    """How often a step makes a launch like this one. Labels begin with the name of the op that the decoder called, or
    in a layer of one that it is composed of."""
    op = OPS[launch.label.partition(" ")[0]]
    return num_layers if op.place.is_in_layer else 1


def _step_launch(observed: ObservedLaunch, count: int) -> StepLaunch:
    weights, kv, activations = 0, 0, 0
    for name, nbytes in observed.array_bytes().items():
        if name.startswith((WEIGHT, VECTOR, TABLE)):
            weights += nbytes
        elif name.startswith(KV):
            kv += nbytes
        else:
            activations += nbytes
    return StepLaunch(observed.label, observed, count, weights, kv, activations)


def _traffic(config: ModelConfig, format: Format, num_seqs: int, query_len: int, context: int) -> Traffic:
    bits = format.block_bytes * 8 / format.block_size
    counted = forward_traffic(config, TensorBits(bits, bits, bits, 32), num_seqs, query_len, context)
    return counted.without_attention + counted.attention
