"""How a planned model is run: number formats, batch, context, GPUs, speculation."""

from __future__ import annotations

from dataclasses import dataclass

from numba_engine.errors import ConfigError
from numba_engine.profiling.hardware import KV_FORMATS, WEIGHT_FORMATS, NumberFormat

MAX_BATCH = 1 << 16
MAX_CONTEXT = 1 << 22


@dataclass(frozen=True, slots=True)
class Workload:
    """How the model is run."""

    weights: NumberFormat | None = WEIGHT_FORMATS["fp16"]
    """None: as the checkpoint stores them."""
    kv: NumberFormat = KV_FORMATS["fp16"]
    batch: int = 1
    """Sequences at once."""
    context: int = 1024
    """Tokens a sequence has in the cache in a decode step; tokens of its prompt in prefill."""
    tp: int = 1
    """GPUs that share every matrix."""
    speculation: Speculation | None = None

    def __post_init__(self) -> None:
        require_in_range("batch", self.batch, 1, MAX_BATCH)
        require_in_range("context", self.context, 1, MAX_CONTEXT)
        require_in_range("tp", self.tp, 1, 1024)

    @property
    def decode_query_len(self) -> int:
        """Tokens of each sequence in a decode pass: with speculation the draft and one more."""
        return 1 if self.speculation is None else self.speculation.draft_len + 1


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculative decoding (Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023)."""

    acceptance: float
    """α: how likely the model is to accept a drafted token."""
    draft_len: int = 4
    """γ: tokens drafted a pass."""
    draft_cost: float = 0.05
    """c: time of the drafter's pass over the model's. The paper's drafters stayed below 0.05."""

    def __post_init__(self) -> None:
        require_in_range("the acceptance rate", self.acceptance, 0, 1)
        require_in_range("the draft length", self.draft_len, 1, 64)
        require_in_range("the draft cost", self.draft_cost, 0, 1)

    @property
    def tokens_per_pass(self) -> float:
        """Expected tokens that one pass of the model yields: (1 - α^(γ+1)) / (1 - α), equation 1."""
        if self.acceptance == 1:
            return self.draft_len + 1.0
        return float((1 - self.acceptance ** (self.draft_len + 1)) / (1 - self.acceptance))


def require_in_range(name: str, value: float, low: int, high: int) -> None:
    if not low <= value <= high:  # not a number is in no range
        raise ConfigError(f"{name} must be {low} to {high}, got {value!r}")
