"""A profile of the demo model: exact weight bytes, and no token changed by looking."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from numba_engine import LLM, EngineConfig, SamplingParams
from numba_engine.profiling.report import ProfileSummary, StepProfile

PROMPT = list(range(100, 137))
NUM_TOKENS = 6
HIDDEN_SIZE, Q8_0_ROW_BYTES = 576, 576 // 32 * 34
KV_BYTES_PER_TOKEN = 2 * 30 * 3 * 64 * 2  # k and v, 30 layers, 3 heads of 64, float16


@pytest.fixture(scope="module")
def llm(demo_path: Path) -> LLM:
    return LLM(str(demo_path), EngineConfig(backend="cpu", num_threads=2, max_num_seqs=4, max_model_len=128))


def generate(llm: LLM) -> tuple[int, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return llm.generate([PROMPT], params)[0].token_ids


def profiled(llm: LLM, *, fusion: bool) -> tuple[list[StepProfile], ProfileSummary, list[int]]:
    llm.start_profile(fusion=fusion)
    steps, tokens = [], []
    for output in llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)):
        step = llm.take_step_profile()
        assert step is not None
        steps.append(step)
        tokens += output.token_ids
    return steps, llm.stop_profile(), tokens


@pytest.mark.parametrize("fusion", [True, False])
def test_a_decode_step_streams_the_files_tensors_once(llm: LLM, demo_path: Path, fusion: bool) -> None:
    plain = generate(llm)
    steps, summary, tokens = profiled(llm, fusion=fusion)
    assert tuple(tokens) == plain
    tensor_bytes = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(demo_path).tensors)
    decode = [step for step in steps if not step.num_prefill_tokens]
    assert len(decode) == NUM_TOKENS - 1
    for i, step in enumerate(decode):
        assert sum(op.weight_bytes for op in step.ops) == tensor_bytes + Q8_0_ROW_BYTES
        context_len = len(PROMPT) + 1 + i
        assert sum(op.kv_bytes for op in step.ops) == (context_len + 1) * KV_BYTES_PER_TOKEN  # all read, one written
        assert 0 < step.ops_time_s < step.time_s
    assert summary.num_decode_steps == NUM_TOKENS - 1
    assert summary.weight_bytes_per_token == tensor_bytes + Q8_0_ROW_BYTES
    assert summary.read_bandwidth_gbps > 0
    assert sum(share for _, share in summary.shares) == pytest.approx(1.0)


def test_without_fusion_every_textbook_op_shows(llm: LLM) -> None:
    steps, _, _ = profiled(llm, fusion=False)
    assert {op.name: op.num_calls for op in steps[-1].ops} == {
        "embedding": 1,
        "rms_norm": 2 * 30 + 1,
        "linear": 2 * 30 + 1,
        "rope": 30,
        "store_kv": 30,
        "attention": 30,
        "linear_add": 2 * 30,
        "silu_and_mul": 30,
        "gather_rows": 1,
        "sample": 1,
    }


def test_a_prefill_step_counts_its_prompt(llm: LLM) -> None:
    steps, summary, _ = profiled(llm, fusion=True)
    prefill = [step for step in steps if step.num_prefill_tokens]
    cached = len(PROMPT) - sum(step.num_prefill_tokens for step in prefill)
    assert cached in (0, 32)  # whole blocks of 16 that an earlier test left in the prefix cache
    assert summary.num_prefill_steps == len(prefill) == 1
    assert summary.prefill_tokens_per_s > 0
