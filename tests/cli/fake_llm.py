"""An LLM that answers every prompt with the same tokens: what the commands are held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numba_engine.config import EngineConfig
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
from numba_engine.profiling.report import OpProfile, ProfileSummary, StepProfile
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
    model_info = MODEL_INFO
    max_num_batched_tokens = 512

    def __init__(self, model: str, config: EngineConfig, *, progress: Callable[[str, int, int], None]) -> None:
        progress("reading weights", 1, 2)
        self.model = model
        self.config = config
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.fusion: bool | None = None
        self._running: str | None = None
        self._num_running = 0
        self._step = 0
        self.warmed_up = False
        self.made.append(self)

    def warm_up(self) -> None:
        assert not self.prompts
        self.warmed_up = True

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return [0, *("|".join(f"{m['role']}:{m['content']}" for m in messages)).encode()]

    def add_request(self, request_id: str, prompt: Sequence[int], params: SamplingParams) -> None:
        self._running, self._step = request_id, 0
        self._num_running += 1
        self.prompts.append(list(prompt))
        self.params.append(params)

    @property
    def has_unfinished(self) -> bool:
        return self._running is not None

    @property
    def stats(self) -> EngineStats:
        zeros: dict[str, Any] = dict.fromkeys(EngineStats.__dataclass_fields__, 0)
        return EngineStats(**{**zeros, "max_num_seqs": 8, "num_kv_blocks": 1000, "block_size": 16})

    def step(self) -> list[RequestOutput]:
        assert self._running is not None
        type(self).on_step(self._step)
        text, token_id = ANSWER[self._step % len(ANSWER)]
        self._step += 1
        return [self._output(text, token_id, self._finish_reason())]

    def _finish_reason(self) -> FinishReason | None:
        params = self.params[-1]
        limit = params.max_tokens or (None if params.ignore_eos else len(ANSWER))
        return FinishReason.MAX_TOKENS if limit and self._step >= limit else None

    def abort(self, request_id: str) -> RequestOutput | None:
        if self._running != request_id:
            return None
        return self._output("", None, FinishReason.ABORTED)

    def _output(self, text: str, token_id: int | None, reason: FinishReason | None) -> RequestOutput:
        request_id = self._running or ""
        if reason:
            self._running, self._num_running = None, 0
        asked = self.params[-1].logprobs is not None and token_id is not None
        chosen = TokenLogprob(token_id or 0, -0.25, text)
        return RequestOutput(
            request_id=request_id,
            text=text,
            token_ids=() if token_id is None else (token_id,),
            logprobs=(PositionLogprobs(chosen, (chosen,)),) if asked else (),
            usage=Usage(prompt_tokens=len(self.prompts[-1]), cached_prompt_tokens=1, completion_tokens=self._step),
            finish_reason=reason,
            timings=Timings(0.0, 0.05, 0.05, 0.02, 0.01, 0) if reason else None,
        )

    def start_profile(self, *, fusion: bool = True, timeline: bool = False, unprofiled_every: int = 0) -> None:
        self.fusion, self.timeline, self.unprofiled_every = fusion, timeline, unprofiled_every

    def take_step_profile(self) -> StepProfile | None:
        prefill = 5 if self._step == 1 else 0
        op = OpProfile("linear", 30, 0.003, 60_000_000, 0, 1000, 120_000_000)
        num_seqs = self._num_running
        return StepProfile(self._step - 1, prefill, 0 if prefill else num_seqs, num_seqs, 0.004, (op,))

    def stop_profile(self, *, decode_seqs: int = 1) -> ProfileSummary:
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
