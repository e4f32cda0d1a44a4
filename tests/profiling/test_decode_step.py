"""A decode step of Llama-3.2-1B counted without a GPU: what it asks for, and the targets of the design."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from numba_engine.backends.cuda.ptxas import find_ptxas
from numba_engine.cli import cli
from numba_engine.formats import BF16, Q8_0
from numba_engine.kernel_lab import decode_step
from numba_engine.kernel_lab.decode_step import IssueSum, ModelStep, observe_decode
from numba_engine.kernel_lab.kernel_model import MODELLED_GPUS
from numba_engine.kernel_lab.observed_model import MODELS
from numba_engine.kernel_lab.step_tables import step_record

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(find_ptxas() is None, reason="ptxas (pip install nvidia-cuda-nvcc) was not found"),
]

H200 = MODELLED_GPUS["h200"]
MATRICES = 16 * (3072 * 2048 + 2048 * 2048 + 2 * 8192 * 2048 + 2048 * 8192) + 128256 * 2048
"""Weights of Llama-3.2-1B that every token reads."""


@pytest.fixture(scope="module")
def step() -> ModelStep:
    return observe_decode("llama-3.2-1b", BF16, (9, 0), context=513)


def test_every_weight_is_read_once_from_memory(step: ModelStep) -> None:
    """Matrices, 33 norms and one row of the embedding, which may lie among others."""
    counted = sum(launch.count * launch.weight_bytes for launch in step.launches)
    assert 2 * MATRICES + 33 * 2048 * 4 + 2048 * 2 <= counted <= 2 * MATRICES + 33 * 2048 * 4 + 2 * 2048 * 2


def test_every_key_and_value_is_read_once(step: ModelStep) -> None:
    """513 tokens, 8 heads of 64, float16, k and v, 16 layers; the new ones are written too."""
    counted = sum(launch.count * launch.kv_bytes for launch in step.launches)
    assert counted == pytest.approx(514 * 8 * 64 * 2 * 2 * 16, rel=0.03)  # whole blocks of 16 tokens


def test_a_layer_is_five_launches(step: ModelStep) -> None:
    assert step.num_launches <= 5 * 16 + 4


def test_a_step_reaches_its_targets(step: ModelStep) -> None:
    assert 0.99 < step.moved_over_once <= 1.02
    assert step.bank_conflict_factor <= 1.02
    assert step.spill_bytes == 0
    assert step.misses(H200) == ()


def test_at_full_bandwidth_all_instructions_can_be_issued(step: ModelStep) -> None:
    total = step.issue_sum(H200)
    assert total.bytes_per_clock == pytest.approx(4.8e12 / 132 / 1.83e9)
    assert 1 / 512 < total.instructions_per_byte < 0.2
    assert total.fits
    assert not IssueSum(10 * total.instructions_per_byte, total.bytes_per_clock).fits
    assert f"= {total.slots:.2f} of 4 issue slots" in str(total)


def test_times_of_launches_add_up_and_no_gpu_beats_its_memory(step: ModelStep) -> None:
    for gpu in MODELLED_GPUS.values():
        record = step_record(step, [gpu])["predicted"][gpu.gpu.key]
        total = sum(launch["count"] * launch["time_s"] for launch in record["launches"])
        assert record["time_s"] == pytest.approx(total)
        assert record["time_s"] > 2 * MATRICES / gpu.bandwidth
        assert record["tokens_per_s"] == pytest.approx(1 / record["time_s"])
        assert record["tflops"] == pytest.approx(2 * MATRICES / record["time_s"] / 1e12, rel=0.05)
        assert 0.3 < record["memory_share"] < 0.93


def test_the_head_streams_its_weights_at_nearly_the_speed_of_a_plain_read(step: ModelStep) -> None:
    head = max(range(len(step.launches)), key=lambda i: step.launches[i].weight_bytes)
    assert step.launches[head].weight_bytes - 128256 * 2048 * 2 in (0, 2048 * 4), "with its norm, if that is fused"
    for gpu in MODELLED_GPUS.values():
        assert step.predictions(gpu)[head].memory_share > 0.85


@pytest.mark.parametrize("fusion", [True, False])
def test_the_head_counts_once_fused_or_not(monkeypatch: pytest.MonkeyPatch, fusion: bool) -> None:
    layers, hidden, intermediate, vocab = 3, 256, 512, 1024
    llama = MODELS["llama-3.2-1b"]
    layer = replace(llama.layers[0], intermediate_size=intermediate)
    small = replace(llama, hidden_size=hidden, layers=(layer,) * layers, vocab_size=vocab)
    monkeypatch.setattr(decode_step, "MODELS", {"small": small})
    step = observe_decode("small", BF16, (9, 0), context=16, fusion=fusion)
    q, kv = 32 * 64, 8 * 64
    weights = layers * ((q + 2 * kv) * hidden + hidden * q + 3 * intermediate * hidden) + vocab * hidden
    counted = sum(launch.count * launch.weight_bytes for launch in step.launches)
    assert 2 * weights <= counted <= 2 * weights + (2 * layers + 3) * hidden * 4


def test_the_command_predicts_steps(step: ModelStep, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def observed(*args: object, **options: object) -> ModelStep:
        asked.append((args, options))
        return step

    monkeypatch.setattr(decode_step, "observe_decode", observed)
    arguments = "kernels --no-cards --model llama-3.2-1b --format q8_0 --gpu a100-80gb --batch 2 --context 40"
    result = CliRunner().invoke(cli, [*arguments.split(), "--no-fusion", "--json"])
    options = {"num_seqs": 2, "context": 40, "fusion": False}
    assert asked == [(("llama-3.2-1b", Q8_0, (9, 0)), options)]
    output = json.loads(result.stdout)
    assert output["cards"] == []
    (record,) = output["steps"]
    assert (record["model"], record["format"], record["context"]) == ("llama-3.2-1b", "BF16", 513)
    assert list(record["predicted"]) == ["a100-80gb"]
    assert result.exit_code == bool(record["predicted"]["a100-80gb"]["misses"])
    monkeypatch.setattr(decode_step, "observe_prefill", observed)
    CliRunner().invoke(cli, [*arguments.split(), "--prompt", "70", "--json"])
    assert asked[1] == (("llama-3.2-1b", Q8_0, (9, 0)), {"num_tokens": 70, "fusion": True})
    table = CliRunner().invoke(cli, arguments.split()).output
    assert "llama-3.2-1b BF16 decode 1 × 513" in table
    assert "of 4 issue slots" in table
