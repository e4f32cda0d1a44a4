"""What the engine hands out: deltas of a request, and facts about model and engine."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace

from numba_engine.errors import NonFiniteLogitsError


class FinishReason(str, enum.Enum):  # noqa: UP042 (the members print as an Enum's, and JSON writes them as text)
    """Why a request ended."""

    STOP_TOKEN = "stop_token"
    STOP_SEQUENCE = "stop_sequence"
    MAX_TOKENS = "max_tokens"
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its log-probability, and the text it stands for by itself (U+FFFD for a part of a character)."""

    token_id: int
    logprob: float
    text: str


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log-probabilities at one output position: of the chosen token, and of the most likely ones, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request so far."""

    prompt_tokens: int
    cached_prompt_tokens: int
    """Prompt tokens whose keys and values were found in the prefix cache."""
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went, in seconds."""

    queue_s: float
    """Arrival until first scheduled."""
    ttft_s: float
    """Arrival until the first token."""
    prefill_s: float
    """First scheduled until the first token."""
    decode_s: float
    """First token until the last."""
    mean_inter_token_s: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one request. The deltas of a request, concatenated, are its whole text and tokens."""

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...]
    """One per token id; empty unless the request asked."""
    usage: Usage
    finish_reason: FinishReason | None = None
    stop_sequence: str | None = None
    """The stop string that matched, with STOP_SEQUENCE."""
    stop_token_id: int | None = None
    """The token that ended it, with STOP_TOKEN; its text is not part of the output."""
    timings: Timings | None = None
    """On the last output."""
    error: str | None = None
    """On the last output of a request that failed, which has no finish reason: why it did."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def raise_error(self) -> None:
        """Raises NonFiniteLogitsError if the request failed."""
        if self.error is not None:
            raise NonFiniteLogitsError(self.error)

    @staticmethod
    def merged(outputs: Sequence[RequestOutput]) -> RequestOutput:
        """One output that says what these, of one request, said one after the other."""
        if len(outputs) == 1:
            return outputs[0]
        return replace(
            outputs[-1],
            text="".join(output.text for output in outputs),
            token_ids=tuple(i for output in outputs for i in output.token_ids),
            logprobs=tuple(p for output in outputs for p in output.logprobs),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request, whole: what ``LLM.generate`` returns."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_sequence: str | None
    stop_token_id: int | None
    logprobs: tuple[PositionLogprobs, ...]
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What is loaded. Heads and intermediate_size are the first layer's, where layers differ."""

    name: str
    architecture: str
    num_parameters: int
    weight_bytes: int
    weight_formats: tuple[str, ...]
    """Storage formats of the matrices, the one with most bytes first."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    backend: str
    device_name: str
    num_threads: int
    activation_dtype: str
    kv_cache_dtype: str
    kv_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine now, and its counters since it started."""

    num_running: int
    num_waiting: int
    max_num_seqs: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    """Blocks a new request could take, cached but unreferenced ones included."""
    block_size: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    num_steps: int
    num_preemptions: int
    num_finished: int
    num_aborted: int
