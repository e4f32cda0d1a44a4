"""An LLM that answers every prompt with the same tokens: what the commands are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numba_engine.backends.instruments import TimeSource
from numba_engine.config import EngineConfig
from numba_engine.engine.validation import ValidRequest
from numba_engine.outputs import (
    EngineStats,
    FinishReason,
    ModelInfo,
    PositionLogprobs,
    RequestOutput,
    Timings,
    TokenLogprob,
    Usage,
)
from numba_engine.profiling import ProfileSession
from numba_engine.profiling.report import OpProfile, Peaks, ProfileSummary, StepProfile
from numba_engine.sampling_params import SamplingParams

ANSWER = (("Par", 10), ("", 11), ("is 🎉\n", 12))
"""Text and token of each step."""

MODEL_INFO = ModelInfo(
    name="tiny",
    architecture="llama",
    num_parameters=134_515_008,
    weight_bytes=98_000_000,
    weight_formats=("Q4_1", "Q8_0"),
    num_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    vocab_size=331,
    max_model_len=2048,
    eos_token_ids=(2, 5),
    has_chat_template=True,
    backend="cpu",
    device_name="EPYC",
    num_threads=2,
    activation_dtype="int8",
    kv_cache_dtype="float16",
    kv_bytes_per_token=46_080,
)


class FakeLLM:
    """Remembers how it was made and what it was asked; ``on_step`` is called before each step."""

    made: list[FakeLLM]
    on_step: Callable[[int], None]
    default_sampling: SamplingParams
    session: FakeSession
    """Where a command profiled it."""
    model_info = MODEL_INFO
    max_num_batched_tokens = 512

    def __init__(self, model: str, config: EngineConfig, *, progress: Callable[[str, int, int], None]) -> None:
        progress("reading weights", 1, 2)
        self.model = model
        self.config = config
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.running: list[str] = []
        self.num_steps = 0
        """Since the last request was added."""
        self.warmed_up = False
        self.made.append(self)

    def warm_up(self) -> None:
        assert not self.prompts
        self.warmed_up = True

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [0, *("|".join(f"{m['role']}:{m['content']}" for m in messages)).encode()]

    def validate(self, prompt: Sequence[int], params: SamplingParams) -> ValidRequest:
        return ValidRequest(tuple(prompt), params)

    def add_request(
        self, request_id: str, prompt: Sequence[int] | ValidRequest, params: SamplingParams | None = None
    ) -> None:
        request = prompt if isinstance(prompt, ValidRequest) else self.validate(prompt, params or self.default_sampling)
        self.running.append(request_id)
        self.num_steps = 0
        self.prompts.append(list(request.token_ids))
        self.params.append(request.params)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running)

    @property
    def stats(self) -> EngineStats:
        zeros: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        return EngineStats(**{**zeros, "max_num_seqs": 8, "num_kv_blocks": 1000, "block_size": 16})

    def step(self) -> list[RequestOutput]:
        assert self.running
        type(self).on_step(self.num_steps)
        text, token_id = ANSWER[self.num_steps % len(ANSWER)]
        self.num_steps += 1
        return [self._output(request_id, text, token_id, self._finish_reason()) for request_id in list(self.running)]

    def _finish_reason(self) -> FinishReason | None:
        params = self.params[-1]
        limit = params.max_tokens or (None if params.ignore_eos else len(ANSWER))
        return FinishReason.MAX_TOKENS if limit and self.num_steps >= limit else None

    def abort(self, request_id: str) -> RequestOutput | None:
        if request_id not in self.running:
            return None
        return self._output(request_id, "", None, FinishReason.ABORTED)

    def _output(self, request_id: str, text: str, token_id: int | None, reason: FinishReason | None) -> RequestOutput:
        if reason:
            self.running.remove(request_id)
        asked = self.params[-1].logprobs is not None and token_id is not None
        chosen = TokenLogprob(token_id or 0, -0.25, text)
        return RequestOutput(
            request_id=request_id,
            text=text,
            token_ids=() if token_id is None else (token_id,),
            logprobs=(PositionLogprobs(chosen, (chosen,)),) if asked else (),
            usage=Usage(prompt_tokens=len(self.prompts[-1]), cached_prompt_tokens=1, completion_tokens=self.num_steps),
            finish_reason=reason,
            timings=Timings(0.0, 0.05, 0.05, 0.02, 0.01, 0) if reason else None,
        )


class FakeSession(ProfileSession):
    """Tells nearly the same of every step of a FakeLLM and of every profile."""

    llm: FakeLLM  # type: ignore[assignment]
    peaks = Peaks("EPYC", 35.0, "measured", None, "unknown", "not measured")  # type: ignore[assignment]
    time_source = TimeSource.HOST_CLOCK  # type: ignore[assignment]

    def __init__(self, llm: FakeLLM) -> None:
        super().__init__(llm)  # type: ignore[arg-type]
        llm.session = self

    def start(self, *, fusion: bool = True, **options: Any) -> None:
        self.fusion = fusion

    def take_step(self) -> StepProfile | None:
        index = self.llm.num_steps - 1
        op = OpProfile("linear", 30, 0.003, 60_000_000, 0, 1000, 120_000_000)
        num_seqs = len(self.llm.running)
        return StepProfile(index, 0 if index else 5, num_seqs if index else 0, num_seqs, 0.004, (op,))

    def stop(self, *, decode_seqs: int = 1) -> ProfileSummary:
        self.decode_seqs = decode_seqs
        op = OpProfile("linear", 60, 0.006, 120_000_000, 0, 2000, 240_000_000)
        return ProfileSummary(
            num_prefill_steps=1,
            num_decode_steps=2,
            prefill_tokens_per_s=1000.0,
            decode_tokens_per_s=250.0,
            read_bandwidth_gbps=35.0,
            bytes_per_token=60_000_000,
            floor_s=0.0017,
            share_of_floor=0.43,
            ops=(op,),
            shares=(("linear", 0.75), ("host", 0.25)),
        )
