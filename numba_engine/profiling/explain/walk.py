"""The way of one token through the engine, as plain values: what was measured, what follows from shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from statistics import mean
from typing import Any

from numba_engine.backends.base import OPS
from numba_engine.backends.ops import Place
from numba_engine.formats import FORMATS
from numba_engine.outputs import ModelInfo
from numba_engine.profiling.explain.caches import CacheLevel
from numba_engine.profiling.explain.close_up import CallProfile, CloseUpStep, Matrix, NamedShape
from numba_engine.profiling.explain.stages import Choice
from numba_engine.profiling.report import OpProfile, sum_ops


@dataclass(frozen=True, slots=True)
class Token:
    """A token and its text by itself (U+FFFD for a part of a character)."""

    token_id: int
    text: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What it took to take some tokens of one sequence through the model. Time is measured, the rest by formula."""

    num_tokens: int
    num_steps: int
    context_len: int
    """Tokens in the KV cache afterwards."""
    time_s: float
    """Of the fastest repetition, the cost of looking subtracted."""
    host_time_s: float
    """Of time_s: scheduling, batch building, text. The rest is inside ops."""
    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    flops: int
    best_gflops: float
    """Of its ops, the highest rate of arithmetic, GFLOP/s."""

    @property
    def memory_bytes(self) -> int:
        """Weights, keys and values; activations stay in the caches."""
        return self.weight_bytes + self.kv_bytes

    @property
    def time_per_token_s(self) -> float:
        return self.time_s / self.num_tokens

    @property
    def weight_bytes_per_token(self) -> float:
        return self.weight_bytes / self.num_tokens

    @property
    def intensity(self) -> float:
        """FLOPs for each byte from memory."""
        return self.flops / self.memory_bytes

    @property
    def gbps(self) -> float:
        return self.memory_bytes / self.time_s / 1e9 if self.time_s else 0.0

    @property
    def gflops(self) -> float:
        return self.flops / self.time_s / 1e9 if self.time_s else 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One op at its place in the model; the same place of all layers together."""

    name: str
    """The op, and its matrix where several ops of the name differ by it."""
    matrix: Matrix | None
    """Of the first layer."""
    inputs: NamedShape
    outputs: NamedShape
    one: OpProfile
    """Bytes and FLOPs of the first layer's call; time of the mean one."""
    total: OpProfile


@dataclass(frozen=True, slots=True)
class EmbeddingRow:
    """The row of the embedding table that the token before is turned into."""

    token: Token
    table: Matrix
    row_bytes: int
    num_values: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Budget:
    """The token's time against the least that memory allows."""

    read_bandwidth_gbps: float
    """Plain read bandwidth of this machine, measured in this run with the same threads; 0 if unknown."""
    memory_bytes: int
    """Weights, keys and values of the token."""
    floor_s: float
    """Time to move them at that bandwidth."""
    time_s: float
    """Of the step explained, in its fastest repetition, the cost of looking subtracted."""
    unwatched_time_s: float
    """The fastest step of a row of tokens with no profile on."""
    share_of_floor: float
    """floor_s / time_s: 1 is the limit of memory."""
    best_gflops: float
    """The highest rate of arithmetic that any op of this run reached: the units can do at least this."""
    arithmetic_s: float
    """The token's FLOPs at that rate."""

    @property
    def idle_share(self) -> float:
        """Of the token's time, what the arithmetic units can have been idle: at least this."""
        return max(1 - self.arithmetic_s / self.time_s, 0.0) if self.time_s else 0.0


@dataclass(frozen=True, slots=True)
class Near:
    """One call of the step from memory, and the same call with its weights in the caches."""

    phase: str
    weight_bytes: int
    in_step_time_s: float
    repeated_time_s: float

    @property
    def speedup(self) -> float:
        return self.in_step_time_s / self.repeated_time_s if self.repeated_time_s else 0.0


@dataclass(frozen=True, slots=True)
class Walk:
    """Everything the explanation says, in its order."""

    model: ModelInfo
    caches: tuple[CacheLevel, ...]
    repetitions: int
    prompt: str
    """As it was tokenised, a chat in its template."""
    prompt_tokens: tuple[Token, ...]
    first_token: Token
    """Drawn from the prompt's last logits; the step explained takes it in."""
    prefill: Cost
    decode: Cost
    """The step explained."""
    embedding: EmbeddingRow
    layer_phases: tuple[Phase, ...]
    layers: OpProfile
    """All layers together."""
    head_phases: tuple[Phase, ...]
    sample: Phase
    choice: Choice
    token: Token
    text: str
    """What the engine put out: of both new tokens together."""
    budget: Budget
    recompute: Cost
    """The same context as a prompt: what the step would be without a KV cache."""
    wide: Cost
    """A longer prompt in one go: many tokens to every weight."""
    near: Near | None

    @property
    def is_simulated(self) -> bool:
        """Times are those of a simulator and say nothing of the device it simulates."""
        return self.model.backend == "ptx"


def fastest(runs: Sequence[CloseUpStep]) -> CloseUpStep:
    """Of runs of one and the same step, the one that nothing disturbed most: what else runs only ever makes it slower.

    One whole run, and no mixture of several, so that its parts add up.
    """
    return min(runs, key=lambda run: run.net_time_s)


def cost_of(steps: Sequence[CloseUpStep], context_len: int) -> Cost:
    """Of the steps that took one sequence to ``context_len``."""
    ops = [call.op for step in steps for call in step.calls]
    total = sum_ops("all", ops)
    return Cost(
        num_tokens=sum(step.num_prefill_tokens + step.num_decode_tokens for step in steps),
        num_steps=len(steps),
        context_len=context_len,
        time_s=sum(step.net_time_s for step in steps),
        host_time_s=sum(step.host_time_s for step in steps),
        weight_bytes=total.weight_bytes,
        kv_bytes=total.kv_bytes,
        activation_bytes=total.activation_bytes,
        flops=total.flops,
        best_gflops=max(op.gflops for op in ops),
    )


@dataclass(frozen=True, slots=True)
class Phases:
    """The calls of a step at their places in the model."""

    embedding: Phase
    layer: tuple[Phase, ...]
    layers: OpProfile
    """All phases of all layers together."""
    head: tuple[Phase, ...]
    sample: Phase


def phases_of(step: CloseUpStep, num_layers: int) -> Phases:
    """Of a step with one embedding, ``num_layers`` equal rows of calls, a head and a draw."""
    embedding, *middle, sample = step.calls
    assert (_place(embedding), _place(sample)) == (Place.START, Place.DRAW)
    head_at = next(i for i, call in enumerate(middle) if _place(call) is Place.HEAD)
    in_layers, head = middle[:head_at], middle[head_at:]
    per_layer, rest = divmod(len(in_layers), num_layers)
    assert rest == 0, "all layers make the same calls"
    places = [in_layers[place::per_layer] for place in range(per_layer)]
    assert all(len({call.op.name for call in calls}) == 1 for calls in places)
    return Phases(
        embedding=_phase([embedding]),
        layer=tuple(_phase(calls) for calls in places),
        layers=sum_ops("layers", [call.op for call in in_layers]),
        head=tuple(_phase([call]) for call in head),
        sample=_phase([sample]),
    )


def _place(call: CallProfile) -> Place:
    return OPS[call.op.name].place


def _phase(calls: Sequence[CallProfile]) -> Phase:
    first = calls[0]
    name = first.op.name
    if OPS[name].takes_any_weight and first.matrix:
        name = f"{name} {first.matrix.name.rpartition('.')[2]}"
    return Phase(
        name=name,
        matrix=first.matrix,
        inputs=first.inputs,
        outputs=first.outputs,
        one=replace(first.op, time_s=mean(call.op.time_s for call in calls)),
        total=sum_ops(name, [call.op for call in calls]),
    )


def embedding_row(token: Token, embedding: Phase) -> EmbeddingRow:
    """The row that ``token`` is, of the table that ``embedding`` looks it up in."""
    table = embedding.matrix
    assert table is not None
    num_values = table.shape[1]
    return EmbeddingRow(
        token=token,
        table=table,
        row_bytes=FORMATS[table.formats[0]].row_bytes(num_values),
        num_values=num_values,
        phase=embedding,
    )


def budget_of(decode: Cost, others: Sequence[Cost], *, read_bandwidth_gbps: float, unwatched_time_s: float) -> Budget:
    """``others`` are what else ran, for the best rate of arithmetic."""
    floor_s = decode.memory_bytes / (read_bandwidth_gbps * 1e9) if read_bandwidth_gbps else 0.0
    best_gflops = max(cost.best_gflops for cost in (decode, *others))
    return Budget(
        read_bandwidth_gbps=read_bandwidth_gbps,
        memory_bytes=decode.memory_bytes,
        floor_s=floor_s,
        time_s=decode.time_s,
        unwatched_time_s=unwatched_time_s,
        share_of_floor=floor_s / decode.time_s if decode.time_s else 0.0,
        best_gflops=best_gflops,
        arithmetic_s=decode.flops / (best_gflops * 1e9) if best_gflops else 0.0,
    )


def near_of(step: CloseUpStep) -> Near | None:
    """What the step's repeated call shows."""
    if step.repeated is None:
        return None
    call, weight_bytes = step.repeated.call, step.repeated.call.op.weight_bytes
    return Near(_phase([call]).name, weight_bytes, step.repeated.in_step_time_s, step.repeated.repeated_time_s)


def as_json(value: Any) -> Any:
    """Dataclasses, however deep, become objects of their fields and properties."""
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        names += [name for name, member in vars(type(value)).items() if isinstance(member, property)]
        return {name: as_json(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    return value
