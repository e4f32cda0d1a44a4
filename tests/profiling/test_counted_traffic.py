"""Formula and counters beside each other: the demo model's first layer, head and sampler, run by the PTX executor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numba_engine import LLM, EngineConfig, SamplingParams
from numba_engine.backends.instruments import CountedTraffic, TimeSource
from numba_engine.model.config import ModelConfig
from numba_engine.model.read_config import read_config
from numba_engine.profiling import ProfileSession
from numba_engine.profiling.report import OpProfile, ProfileSummary, StepProfile

pytestmark = pytest.mark.kernels

PROMPT = [7, 1009, 20011]  # rows of the embedding table that share no load
HIDDEN_VECTOR_BYTES = 576 * 4
TEXTBOOK = {
    "embedding",
    "rms_norm",
    "linear",
    "rope",
    "store_kv",
    "attention",
    "linear_add",
    "gated_activation",
    "gather_rows",
    "sample",
}


@pytest.fixture(scope="module")
def llm(demo_path: Path) -> Iterator[LLM]:
    pytest.importorskip("numba_cuda")

    def first_layer(checkpoint: Any) -> ModelConfig:
        for name in [n for n in checkpoint.tensors if n.startswith("blk.") and not n.startswith("blk.0.")]:
            del checkpoint.tensors[name]
        config = read_config(checkpoint)
        return replace(config, layers=config.layers[:1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("numba_engine.engine.loading.read_config", first_layer)
        yield LLM(str(demo_path), EngineConfig(backend="ptx", max_num_seqs=1, max_model_len=32, num_kv_blocks=2))


@pytest.fixture(scope="module")
def textbook(llm: LLM) -> tuple[list[StepProfile], ProfileSummary]:
    return profiled(llm, fusion=False)


@pytest.fixture(scope="module")
def fused(llm: LLM) -> tuple[list[StepProfile], ProfileSummary]:
    return profiled(llm, fusion=True)


def profiled(llm: LLM, *, fusion: bool) -> tuple[list[StepProfile], ProfileSummary]:
    """A prefill step and a decode step."""
    session = ProfileSession(llm)
    session.start(fusion=fusion, timeline=True, unprofiled_every=1)
    llm.add_request("r", PROMPT, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    steps = []
    while llm.has_unfinished:
        llm.step()
        step = session.take_step()
        assert step is not None
        steps.append(step)
    return steps, session.stop()


def counted(op: OpProfile) -> CountedTraffic:
    assert op.counted is not None
    return op.counted


@pytest.mark.parametrize("run", ["textbook", "fused"])
def test_what_is_read_and_written_is_what_the_formula_says(run: str, request: pytest.FixtureRequest) -> None:
    steps, _ = request.getfixturevalue(run)
    assert [(step.num_prefill_tokens, step.num_decode_tokens) for step in steps] == [(len(PROMPT), 0), (0, 1)]
    for step in steps:
        for op in step.ops:
            dram = counted(op).dram
            of_op = f"{op.name}, {step.num_prefill_tokens} prompt tokens"
            assert dram.weights == pytest.approx(op.weight_bytes, rel=0.01), of_op
            assert dram.kv == pytest.approx(op.kv_bytes, rel=0.01), of_op
            assert dram.activations == pytest.approx(op.activation_bytes, rel=0.01), of_op
            # The sampler's blocks leave 12 bytes for each 128 logits to the last one, which reads 8 of them if greedy.
            assert dram.scratch <= (0.04 if op.name == "sample" else 0.01) * op.total_bytes, of_op


def test_all_textbook_ops_are_there(textbook: tuple[list[StepProfile], ProfileSummary]) -> None:
    assert all({op.name for op in step.ops} == TEXTBOOK for step in textbook[0])


@pytest.mark.parametrize("run", ["textbook", "fused"])
def test_weights_and_kv_pass_l2_once_in_decode(run: str, request: pytest.FixtureRequest) -> None:
    """Each sector goes to one multiprocessor. Only the vector of a norm that is fused goes to every block."""
    steps, _ = request.getfixturevalue(run)
    for op in steps[1].ops:
        l2 = counted(op).l2
        assert l2.kv == pytest.approx(op.kv_bytes, rel=0.01), op.name
        if op.weight_bytes < 100_000:
            continue  # a norm's vector, or a row of the table, of which the scales of other rows are in its sectors
        if op.name.startswith("norm_"):
            again = l2.weights - op.weight_bytes
            assert again % HIDDEN_VECTOR_BYTES == 0, op.name
            assert 0 <= again // HIDDEN_VECTOR_BYTES < 1000, op.name
        else:
            assert l2.weights == pytest.approx(op.weight_bytes, rel=0.01), op.name


@pytest.mark.parametrize("run", ["textbook", "fused"])
def test_few_lanes_ask_for_the_same_weights(run: str, request: pytest.FixtureRequest) -> None:
    """Quants once; a scale by the lanes of a warp that share its block."""
    steps, _ = request.getfixturevalue(run)
    for op in (op for op in steps[1].ops if op.weight_bytes > 100_000):
        assert op.weight_bytes <= counted(op).lanes.weights <= 2 * counted(op).l2.weights, op.name


@pytest.mark.parametrize("run", ["textbook", "fused"])
def test_no_level_further_in_sees_less(run: str, request: pytest.FixtureRequest) -> None:
    steps, _ = request.getfixturevalue(run)
    for op in (op for step in steps for op in step.ops):
        c = counted(op)
        for kind in ("weights", "kv", "activations"):
            memory, l2 = getattr(c.dram, kind), getattr(c.l2, kind)
            assert l2 >= 0.99 * memory, f"{op.name}, {kind}"
        assert c.register_bytes >= c.lanes.total
        assert c.shared_wavefronts >= c.shared_wavefronts_ideal
        assert 1 <= c.warp_instructions <= c.lane_instructions <= 32 * c.warp_instructions


def test_times_are_predictions_and_say_so(textbook: tuple[list[StepProfile], ProfileSummary]) -> None:
    steps, summary = textbook
    assert summary.time_source is TimeSource.SIMULATED
    assert summary.peaks is not None
    assert (summary.peaks.device, summary.peaks.read_bandwidth_gbps) == ("NVIDIA H200 SXM", 4800)
    assert "datasheet" in summary.peaks.read_bandwidth_source
    for step in steps:
        assert step.profiled  # predictions need no step without looking
        assert step.time_source is TimeSource.SIMULATED
        assert step.time_s == pytest.approx(step.ops_time_s)
        assert (step.overhead_s, step.host_time_s) == (0, 0)
    decode = {op.name: op for op in steps[1].ops}
    head = decode["linear"]  # q, k, v, gate and up of a layer, and the head, which is most of it
    assert head.num_launches == counted(head).num_launches
    assert head.time_s == pytest.approx(1.3e-6 * head.num_launches + head.weight_bytes / 4.8e12, rel=0.01)
    assert steps[1].num_launches == sum(call.num_launches for call in steps[1].timeline)


def test_calls_lie_end_to_end_and_know_their_layer(textbook: tuple[list[StepProfile], ProfileSummary]) -> None:
    calls = textbook[0][1].timeline
    assert [call.layer for call in calls] == [None, *[0] * (len(calls) - 5), *[None] * 4]
    assert [call.name for call in calls[-4:]] == ["gather_rows", "rms_norm", "linear", "sample"]
    for before, after in itertools.pairwise(calls):
        assert after.start_s == pytest.approx(before.start_s + before.time_s)


def test_counting_ends_with_the_profile(llm: LLM, textbook: object) -> None:
    backend: Any = llm.engine.backend
    backend.gated_activation(
        backend.empty((1, 8), np.dtype(np.float32)), backend.upload(np.ones((1, 16), np.float32)), "silu"
    )
    assert backend.device.launches == []
