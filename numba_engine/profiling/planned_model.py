"""What the planner asks of a model, and a model of which only the number of parameters is known."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Protocol

import numpy as np

from numba_engine.backends import traffic
from numba_engine.errors import ConfigError
from numba_engine.profiling.hardware import NumberFormat
from numba_engine.profiling.workload import Workload, require_in_range

MAX_PARAMETERS = 10**15


class PlannedModel(Protocol):
    """What the planner asks of a model."""

    @property
    def name(self) -> str: ...
    @property
    def num_parameters(self) -> int: ...
    @property
    def max_position(self) -> int | None: ...
    def weight_format(self, workload: Workload) -> NumberFormat: ...
    def demand(self, workload: Workload, query_len: int) -> Demand:
        """Of one pass on one GPU: ``query_len`` new tokens, the last of their context, for each sequence."""

    def resident_weight_bytes(self, workload: Workload) -> float:
        """On one GPU."""

    def kv_bytes_per_token(self, workload: Workload) -> float:
        """On one GPU; 0 where the shape is not known."""

    def score_bytes(self, workload: Workload) -> float:
        """The attention scores of a prefill in fp16, all layers, on one GPU."""

    def can_be_shared(self, tp: int) -> bool: ...


@dataclass(frozen=True, slots=True)
class Demand:
    """What one forward pass asks of one GPU."""

    weight_bytes: float
    kv_bytes: float
    """Read and written."""
    activation_bytes: float
    """Between the phases, in L2."""
    matrix_flops: float
    """All but attention's."""
    attention_flops: float
    all_reduce_bytes: float = 0.0
    """Of one all-reduce."""
    num_all_reduces: int = 0

    @property
    def memory_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def flops(self) -> float:
        return self.matrix_flops + self.attention_flops


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """A model of which only the number of parameters is known: every pass reads and uses all of them."""

    num_parameters: int
    shape: KVShape | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_parameters <= MAX_PARAMETERS:
            raise ConfigError(f"params must be 1 to {MAX_PARAMETERS:.0e}, got {self.num_parameters!r}")

    @property
    def name(self) -> str:
        return f"{self.num_parameters / 1e9:g}B parameters"

    @property
    def max_position(self) -> int | None:
        return None

    def weight_format(self, workload: Workload) -> NumberFormat:
        if workload.weights is None:
            raise ConfigError("a parameter count says nothing of how the weights are stored; give a weight format")
        return workload.weights

    def demand(self, workload: Workload, query_len: int) -> Demand:
        num_tokens = workload.batch * query_len
        weights = Demand(
            weight_bytes=self.resident_weight_bytes(workload),
            kv_bytes=0.0,
            activation_bytes=0.0,
            matrix_flops=2.0 * self.num_parameters * num_tokens / workload.tp,
            attention_flops=0.0,
        )
        if self.shape is None:
            return weights
        hidden_size, num_layers = self.shape.hidden_size, self.shape.num_layers
        context = max(workload.context, query_len)
        pairs, visible = traffic.visible_tokens(np.array([query_len]), np.array([context]), None)
        return replace(
            weights,
            kv_bytes=workload.batch * (visible + query_len) * self.kv_bytes_per_token(workload),
            attention_flops=4.0 * workload.batch * pairs * hidden_size * num_layers / workload.tp,
            all_reduce_bytes=2.0 * num_tokens * hidden_size,
            num_all_reduces=2 * num_layers if workload.tp > 1 else 0,
        )

    def resident_weight_bytes(self, workload: Workload) -> float:
        return self.weight_format(workload).nbytes(self.num_parameters) / workload.tp

    def kv_bytes_per_token(self, workload: Workload) -> float:
        if self.shape is None:
            return 0.0
        if not self.can_be_shared(workload.tp):
            raise ConfigError(f"{self.shape.num_kv_heads} KV heads cannot be shared among tp = {workload.tp} GPUs")
        num_kv_heads = max(1, self.shape.num_kv_heads // workload.tp)
        return workload.kv.nbytes(2 * self.shape.num_layers * num_kv_heads * self.shape.head_dim)

    def score_bytes(self, workload: Workload) -> float:
        if self.shape is None:
            return 0.0
        heads = self.shape.hidden_size / self.shape.head_dim / workload.tp
        return 2.0 * workload.batch * workload.context**2 * heads * self.shape.num_layers

    def can_be_shared(self, tp: int) -> bool:
        return self.shape is None or shares_kv_heads(self.shape.num_kv_heads, tp)


@dataclass(frozen=True, slots=True)
class KVShape:
    """What attention and all-reduces need to know of a model given by its parameter count."""

    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            require_in_range(name, value, 1, 1 << 20)


def shares_kv_heads(num_kv_heads: int, tp: int) -> bool:
    """Whether each GPU can have as many KV heads as any other: some of them, or a copy of one."""
    return num_kv_heads % tp == 0 or tp % num_kv_heads == 0
