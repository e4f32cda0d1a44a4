"""FakeLLM, FakeSession: the engine's interface without a model: the service's tests are quick, their steps controlled.

Tokens are bytes, and a prompt is echoed again and again: after "ab" comes "ababab…". Token 256 ends a text. The
scheduling is the simplest that has a queue, slots and prompt chunks.
"""

from __future__ import annotations

import codecs
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from numba_engine import (
    CountedTraffic,
    EngineStats,
    FieldViolation,
    FinishReason,
    InvalidRequestError,
    MemoryUse,
    ModelInfo,
    OpCall,
    OpProfile,
    Peaks,
    PositionLogprobs,
    ProfileSummary,
    QueueFullError,
    RequestOutput,
    SamplingParams,
    StepProfile,
    TimeSource,
    Timings,
    TokenLogprob,
    Usage,
    ValidRequest,
    model_of_size,
)

END_TOKEN = 256
VOCAB_SIZE = 257


@dataclass
class _Request:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    prefilled: int = 0
    arrival: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )


class FakeLLM:
    """Steps at once, or, ``gated``, only as often as :meth:`allow` says."""

    def __init__(
        self,
        *,
        gated: bool = False,
        step_delay_s: float = 0.0,
        max_num_seqs: int = 4,
        max_waiting: int = 8,
        prefill_chunk: int = 64,
        prefills_alone: bool = False,
        max_model_len: int = 4096,
        has_chat_template: bool = True,
        default_sampling: SamplingParams | None = None,
    ) -> None:
        self.default_sampling = default_sampling or SamplingParams(temperature=0.7)
        self.model_info = ModelInfo(
            name="fake",
            architecture="echo",
            num_parameters=1234,
            weight_bytes=5678,
            weight_formats=("Q4_1", "F32"),
            num_layers=2,
            hidden_size=64,
            intermediate_size=96,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            eos_token_ids=(END_TOKEN,),
            has_chat_template=has_chat_template,
            backend="cpu",
            device_name="none",
            num_threads=2,
            activation_dtype="int8",
            kv_cache_dtype="float16",
            kv_bytes_per_token=100,
        )
        self.fail_in_step: BaseException | None = None
        self.fail_in_add: Exception | None = None
        self.in_tokenize: Callable[[], None] = lambda: None
        self.seen_params: list[SamplingParams] = []
        self.seen_prompts: list[list[int]] = []
        self.after_step: Callable[[int, int, float], None] = lambda num_prefilling, num_seqs, time_s: None
        """Told of each step what ran in it."""
        self.max_num_batched_tokens = 512
        self._unclaimed: list[RequestOutput] = []
        self.num_steps = 0
        self._gated = gated
        self._step_delay_s = step_delay_s
        self._permits = threading.Semaphore(0)
        self._max_num_seqs = max_num_seqs
        self._max_waiting = max_waiting
        self._prefill_chunk = prefill_chunk
        self._prefills_alone = prefills_alone
        self._waiting: list[_Request] = []
        self._running: list[_Request] = []
        self._num_finished = self._num_aborted = self._num_completion_tokens = 0

    def allow(self, steps: int) -> None:
        """Lets a gated engine take more steps."""
        self._permits.release(steps)

    def open_gate(self) -> None:
        self._gated = False
        self._permits.release(1)

    # ---- text ----------------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.in_tokenize()
        return list(text.encode())

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        if any(i >= VOCAB_SIZE for i in token_ids):
            raise InvalidRequestError(FieldViolation("token_ids", "is not in the vocabulary"))
        end = "" if skip_special_tokens else "<end>"
        return "".join(end if i == END_TOKEN else chr(i) for i in token_ids)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if not messages:
            raise InvalidRequestError(FieldViolation("messages", "must hold at least one message"))
        bad = [FieldViolation(f"messages[{i}].role", "must be a name") for i, m in enumerate(messages) if not m["role"]]
        if bad:
            raise InvalidRequestError(*bad)
        return self.tokenize("".join(f"{m['role']}:{m['content']}\n" for m in messages))

    def validate(self, prompt: str | Sequence[int], params: SamplingParams) -> ValidRequest:
        token_ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        if not token_ids:
            raise InvalidRequestError(FieldViolation("prompt", "has no tokens; give at least one"))
        if len(token_ids) >= self.model_info.max_model_len:
            raise InvalidRequestError(FieldViolation("prompt", f"is {len(token_ids)} tokens"))
        for name, ids in (("prompt", token_ids), ("sampling.stop_token_ids", params.stop_token_ids)):
            if any(i >= VOCAB_SIZE for i in ids):
                raise InvalidRequestError(FieldViolation(name, "is not in the vocabulary"))
        return ValidRequest(tuple(token_ids), params)

    # ---- requests ------------------------------------------------------------------------------------------------

    def add_request(self, request_id: str, request: ValidRequest) -> None:
        if self.fail_in_add is not None:
            raise self.fail_in_add
        if len(self._waiting) + len(self._running) >= self._max_num_seqs + self._max_waiting:
            raise QueueFullError(len(self._waiting), self._max_waiting, 1.5)
        prompt = list(request.token_ids)
        self.seen_params.append(request.params)
        self.seen_prompts.append(prompt)
        self._waiting.append(_Request(request_id, prompt, request.params))

    def abort(self, request_id: str) -> RequestOutput | None:
        outputs = [output for output in self._unclaimed if output.request_id == request_id]
        self._unclaimed = [output for output in self._unclaimed if output.request_id != request_id]
        for request in self._waiting + self._running:
            if request.request_id == request_id:
                self._num_aborted += 1
                outputs.append(self._output(request, "", (), FinishReason.ABORTED))
        return RequestOutput.merged(outputs) if outputs else None

    def step(self) -> list[RequestOutput]:
        if self._gated:
            self._permits.acquire()
        if self.fail_in_step is not None:
            raise self.fail_in_step
        if self._step_delay_s:
            time.sleep(self._step_delay_s)
        started = time.monotonic()
        while self._waiting and len(self._running) < self._max_num_seqs:
            self._running.append(self._waiting.pop(0))
        requests = list(self._running)
        prefilling = [r for r in requests if r.prefilled < len(r.prompt)]
        if self._prefills_alone:
            requests = [r for r in requests if r not in prefilling[1:]]
            prefilling = prefilling[:1]
        outputs, self._unclaimed = self._unclaimed, []
        outputs += [output for request in requests if (output := self._advance(request)) is not None]
        self.num_steps += 1
        self.after_step(len(prefilling), len(requests), time.monotonic() - started)
        return outputs

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running or self._unclaimed)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            max_num_seqs=self._max_num_seqs,
            num_kv_blocks=100,
            num_free_kv_blocks=100 - len(self._running),
            block_size=16,
            prompt_tokens=0,
            cached_prompt_tokens=0,
            completion_tokens=self._num_completion_tokens,
            num_steps=self.num_steps,
            num_preemptions=0,
            num_finished=self._num_finished,
            num_aborted=self._num_aborted,
        )

    def run_ahead(self, num_steps: int) -> None:
        """Take steps whose outputs come out with the next one."""
        for _ in range(num_steps):
            self._unclaimed += [output for request in list(self._running) if (output := self._advance(request))]

    # ---- parts of a step -----------------------------------------------------------------------------------------

    def _advance(self, request: _Request) -> RequestOutput | None:
        limit = request.params.time_limit_s
        if limit is not None and time.monotonic() - request.arrival > limit:
            return self._output(request, "", (), FinishReason.TIME_LIMIT)
        if request.prefilled < len(request.prompt):
            request.prefilled += self._prefill_chunk
            if request.prefilled < len(request.prompt):
                return None
        token_id = request.prompt[len(request.token_ids) % len(request.prompt)]
        self._num_completion_tokens += 1
        if token_id in (END_TOKEN, *request.params.stop_token_ids) and not request.params.ignore_eos:
            return self._output(request, "", (), FinishReason.STOP_TOKEN, stop_token_id=token_id)
        request.token_ids.append(token_id)
        text = request.decoder.decode(bytes([token_id]) if token_id < END_TOKEN else b"")
        request.text += text
        for stop in request.params.stop:
            if stop in request.text:
                # Good enough here: stops of one character.
                return self._output(request, "", (token_id,), FinishReason.STOP_SEQUENCE, stop_sequence=stop)
        reason = None
        if len(request.token_ids) == request.params.max_tokens:
            reason = FinishReason.MAX_TOKENS
        elif len(request.token_ids) + len(request.prompt) >= self.model_info.max_model_len:
            reason = FinishReason.CONTEXT_FULL
        return self._output(request, text, (token_id,), reason)

    def _output(
        self,
        request: _Request,
        text: str,
        token_ids: tuple[int, ...],
        reason: FinishReason | None,
        *,
        stop_sequence: str | None = None,
        stop_token_id: int | None = None,
    ) -> RequestOutput:
        if reason is not None:
            self._num_finished += reason is not FinishReason.ABORTED
            (self._running if request in self._running else self._waiting).remove(request)
        logprobs: tuple[PositionLogprobs, ...] = ()
        if request.params.logprobs is not None:
            top = tuple(TokenLogprob(i, -1.5 * i, chr(97 + i)) for i in range(request.params.logprobs))
            logprobs = tuple(PositionLogprobs(TokenLogprob(i, -0.5, chr(i)), top) for i in token_ids)
        return RequestOutput(
            request.request_id,
            text,
            token_ids,
            logprobs,
            Usage(len(request.prompt), 2, len(request.token_ids)),
            reason,
            stop_sequence,
            stop_token_id,
            Timings(0.1, 0.2, 0.3, 0.4, 0.5, 6) if reason else None,
        )


class FakeSession:
    """The profiles of a FakeLLM: each step and each summary says the same."""

    def __init__(self, llm: FakeLLM) -> None:
        self.llm = llm
        self.peaks = Peaks(
            device="none",
            read_bandwidth_gbps=33.0,
            read_bandwidth_source="measured",
            gflops=100.0,
            gflops_source="a datasheet",
            arithmetic="fma",
        )
        self.time_source = TimeSource.HOST_CLOCK
        self.planned_model = model_of_size(8 * 10**9)
        self.weight_bytes_per_token = {"embed_tokens": 8, "qkv_proj": 32}
        self.profiles: list[bool] = []
        """The fusion of each profile that was started."""
        self.num_unfinished_at_start: list[int] = []
        """Requests in the engine when each profile was started."""
        self.profile_is_on = False
        self.fail_in_stop: Exception | None = None
        self.steps_ahead_of_a_profile = 0
        """Steps that were launched ahead: done when a profile starts, they come out with the next one."""
        self.timeline_calls = 2
        self.counted: CountedTraffic | None = None
        self._last_step: StepProfile | None = None
        self._num_steps = self._unprofiled_every = 0
        self._timeline = False
        llm.after_step = self._after_step

    def start(self, *, fusion: bool, timeline: bool, unprofiled_every: int) -> None:
        assert not self.profile_is_on
        self.profile_is_on, self._num_steps = True, 0
        self._timeline, self._unprofiled_every = timeline, unprofiled_every
        self.llm.run_ahead(self.steps_ahead_of_a_profile)
        self.profiles.append(fusion)
        stats = self.llm.stats
        self.num_unfinished_at_start.append(stats.num_waiting + stats.num_running)

    def take_step(self) -> StepProfile | None:
        profile, self._last_step = self._last_step, None
        return profile

    def _after_step(self, num_prefilling: int, num_seqs: int, time_s: float) -> None:
        if not self.profile_is_on:
            return
        op = OpProfile("linear", 3, 0.5, 1000, 20, 300, 4000, 7, 80, num_launches=6, counted=self.counted)
        calls = [OpCall("linear", None if i else 7, 0.25 * i, 0.125, 2, 660, 2000) for i in range(self.timeline_calls)]
        self._last_step = StepProfile(
            index=self._num_steps,
            num_prefill_tokens=num_prefilling,
            num_decode_tokens=num_seqs - num_prefilling,
            num_seqs=num_seqs,
            time_s=time_s,
            ops=(op,),
            overhead_s=0.125,
            launch_gap_s=0.0625,
            timeline=tuple(calls) if self._timeline else (),
            profiled=not self._unprofiled_every or self._num_steps % self._unprofiled_every != 0,
        )
        self._num_steps += 1

    def stop(self, *, decode_seqs: int) -> ProfileSummary:
        assert self.profile_is_on
        self.profile_is_on = False
        if self.fail_in_stop is not None:
            raise self.fail_in_stop
        op = OpProfile("linear", 30, 5.0, 10000, 200, 3000, 40000)
        return ProfileSummary(
            num_prefill_steps=1,
            num_decode_steps=max(self._num_steps - 1, 0),
            prefill_tokens_per_s=11.0,
            decode_tokens_per_s=22.0,
            read_bandwidth_gbps=33.0,
            bytes_per_token=44,
            floor_s=0.5,
            share_of_floor=0.25,
            ops=(op,),
            shares=(("linear", 0.75), ("host", 0.25)),
            weight_bytes_per_token=40,
            kv_bytes_per_token=4,
            overhead_s_per_step=0.0625,
            decode_tokens_per_s_p10=20.0,
            decode_tokens_per_s_p90=23.0,
            prefill_ops=(op, op),
            prefill_shares=(("linear", 1.0),),
            decode_arithmetic_idle_share=0.96875,
            launches_per_step=6.0,
            launch_gap_s_per_step=0.03125,
            host_s_per_step=0.5,
            memory=MemoryUse(1000, 2000, 300, 4000, 5000),
            decode_seqs=decode_seqs,
        )
