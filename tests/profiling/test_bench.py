"""The bench: which steps it times, what it counts, and that no prompt repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from numba_engine import ValidRequest
from numba_engine.errors import ConfigError
from numba_engine.outputs import EngineStats, FinishReason, ModelInfo, RequestOutput, Usage
from numba_engine.profiling import ProfileSession, bench
from numba_engine.profiling.bench import run_bench
from numba_engine.profiling.recorder import summarize
from numba_engine.profiling.report import OpProfile, ProfileSummary, StepProfile
from numba_engine.sampling_params import SamplingParams
from tests.profiling.sample_profile import peaks

INFO = ModelInfo(
    **dict.fromkeys(ModelInfo.__dataclass_fields__, 1) | {"vocab_size": 50, "max_model_len": 64},  # type: ignore[arg-type]
)
STATS = EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {"max_num_seqs": 4})
PREFILL_S, DECODE_S = 0.5, 0.25


class ScriptedLLM:
    """Prefills at most 8 tokens a step, decodes one a sequence, and moves the clock by what each costs."""

    model_info = INFO

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.pending: dict[str, int] = {}  # prompt tokens still to come
        self.left: dict[str, int] = {}
        self.prompts: list[tuple[int, ...]] = []
        self.last: StepProfile | None = None
        monkeypatch.setattr(bench.time, "perf_counter", lambda: self.now)

    @property
    def stats(self) -> EngineStats:
        return replace(STATS, num_kv_blocks=20, block_size=8)

    def validate(self, prompt: Sequence[int], params: SamplingParams) -> ValidRequest:
        return ValidRequest(tuple(prompt), params)

    def add_request(self, request_id: str, request: ValidRequest) -> None:
        self.prompts.append(request.token_ids)
        self.pending[request_id] = len(request.token_ids)
        self.left[request_id] = request.params.max_tokens or 1000

    def abort(self, request_id: str) -> RequestOutput | None:
        del self.left[request_id]
        return None

    def step(self) -> list[RequestOutput]:
        outputs = []
        prefilled = 0
        for request_id in list(self.left):
            if self.pending[request_id] > 1:
                taken = min(8 - prefilled, self.pending[request_id])
                prefilled += taken
                self.pending[request_id] -= taken
                if self.pending[request_id]:
                    continue
            self.left[request_id] -= 1
            finished = not self.left[request_id]
            if finished:
                del self.left[request_id]
            reason = FinishReason.MAX_TOKENS if finished else None
            outputs.append(RequestOutput(request_id, "", (7,), (), Usage(1, 0, 1), finish_reason=reason))
        self.now += PREFILL_S if prefilled else DECODE_S
        op = OpProfile("linear", 1, 0.1, weight_bytes=10**9, kv_bytes=10**8, activation_bytes=5, flops=10**10)
        self.last = StepProfile(0, prefilled, len(outputs), 1, 1.0, (op,))
        return outputs


class ScriptedSession(ProfileSession):
    llm: ScriptedLLM  # type: ignore[assignment]

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(ScriptedLLM(monkeypatch))  # type: ignore[arg-type]
        self.profiling = False

    def start(self, **options: Any) -> None:
        self.profiling = True

    def take_step(self) -> StepProfile | None:
        return self.llm.last if self.profiling else None

    def stop(self, *, decode_seqs: int = 1) -> ProfileSummary:
        self.profiling = False
        return summarize([], peaks=peaks(20.0))


def test_rows_time_the_right_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ScriptedSession(monkeypatch)
    pp, tg = run_bench(session, prompt_tokens=20, gen_tokens=10, repetitions=3)
    assert (pp.name, pp.num_tokens) == ("pp20", 20)
    assert pp.tokens_per_s == pytest.approx(20 / (3 * PREFILL_S))  # three chunks of up to 8
    assert pp.gbps == pytest.approx(3 * 1.1 / (3 * PREFILL_S))
    assert (tg.name, tg.num_tokens) == ("tg10", 10)
    assert tg.tokens_per_s == pytest.approx(1 / DECODE_S)
    assert tg.gbps == pytest.approx(1.1 / DECODE_S)
    assert tg.gflops == pytest.approx(10 / DECODE_S)
    assert tg.share_of_bandwidth == pytest.approx(1.1 / DECODE_S / 20)
    assert tg.tokens_per_s_sd == pytest.approx(0.0)
    assert not session.llm.left


def test_decoding_at_a_depth_leaves_the_prefill_out(monkeypatch: pytest.MonkeyPatch) -> None:
    (tg,) = run_bench(ScriptedSession(monkeypatch), prompt_tokens=0, gen_tokens=10, repetitions=1, depth=30, batch=3)
    assert tg.name == "tg10 @ d30 × 3"
    assert tg.num_tokens == 30
    assert tg.tokens_per_s == pytest.approx(3 / DECODE_S)


def test_no_two_prompts_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    session = ScriptedSession(monkeypatch)
    run_bench(session, prompt_tokens=20, gen_tokens=0, repetitions=4, batch=2)
    prompts = session.llm.prompts
    assert len(prompts) == 2 * (1 + 4)  # the warm-up has its own
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_tokens": 64}, "max_model_len is 64, but 65 tokens are needed"),
        ({"gen_tokens": 32, "depth": 40}, "73 tokens are needed"),
        ({"batch": 5}, "max_num_seqs is 4, but 5 sequences"),
        ({"prompt_tokens": 50, "batch": 3}, "20 blocks, but 21 are needed"),
    ],
)
def test_a_bench_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: dict[str, int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_bench(ScriptedSession(monkeypatch), **({"prompt_tokens": 8, "gen_tokens": 8} | arguments))
