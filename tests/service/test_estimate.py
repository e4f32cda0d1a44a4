"""EstimateThroughput: what ``numba-engine roofline`` says, of any model, with every wrong field named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from numba_engine import LLM, EngineConfig
from numba_engine.cli import cli
from numba_engine.profiling import ProfileSession
from numba_engine_api.v1 import inference_pb2 as api
from tests.service.conftest import Serve, Served
from tests.service.test_errors import failure_of, violations
from tests.tiny_models import TinyModel, write_hf

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}


def roofline(*arguments: str) -> list[dict[str, Any]]:
    """What the command says."""
    result = CliRunner().invoke(cli, ["roofline", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    estimates: list[dict[str, Any]] = json.loads(result.stdout)["estimates"]
    return estimates


async def estimates(served: Served, **fields: Any) -> list[api.ThroughputEstimate]:
    response = await served.stub.EstimateThroughput(api.EstimateThroughputRequest(**fields))
    return list(response.estimates)


def assert_same(one: api.ThroughputEstimate, said: dict[str, Any]) -> None:
    """Figure by figure; what is not known is not set."""
    assert (one.num_parameters, one.weight_format) == (said["num_parameters"], said["weight_format"])
    assert (one.batch, one.context) == (said["workload"]["batch"], said["workload"]["context"])
    assert (one.tensor_parallel, one.kv_format) == (said["workload"]["tp"], said["workload"]["kv"]["name"])
    assert (one.gpu.key, one.gpu.memory_bytes) == (said["gpu"]["key"], said["gpu"]["memory_bytes"])
    assert one.gpu.peaks[0].value == said["gpu"]["bandwidth_gbps"]
    for phase, name in ((one.decode, "decode"), (one.prefill, "prefill")):
        assert phase.time_per_token_s == said[name]["time_per_token_s"]
        assert phase.tokens_per_s == said[name]["tokens_per_s"]
        assert phase.pass_s == said[name]["round_s"]
        assert api.Bound.Name(phase.bound) == f"BOUND_{said[name]['pass_time']['bound']}"
        times = (phase.memory_s, phase.compute_s, phase.link_s)
        assert times == tuple(said[name]["pass_time"][part] for part in ("memory_s", "compute_s", "link_s"))
        demand = said[name]["demand"]
        assert (phase.weight_bytes, phase.kv_bytes, phase.flops) == tuple(
            demand[part] for part in ("weight_bytes", "kv_bytes", "flops")
        )
        assert_optional(phase, "share_of_tensor_peak", said[name])
        assert_optional(phase, "share_of_shader_fp16_peak", said[name])
    for name in ("weight_bytes", "kv_bytes", "kv_bytes_per_token", "total_bytes", "available_bytes", "fits"):
        assert getattr(one.memory, name) == said["memory"][name], name
    assert_optional(one.memory, "max_sequences", said["memory"])
    assert_optional(one.memory, "max_context", said["memory"])
    for name in ("machine_balance", "ridge_batch", "joules_per_token_at_tdp"):
        assert_optional(one, name, said)
    assert (one.decode_intensity, one.joules_per_token) == (said["decode_intensity"], said["joules_per_token"])
    levers = [(x.name, x.change, x.metric, x.tokens_per_s, x.factor, x.memory_bytes, x.fits) for x in one.levers]
    names = ("name", "change", "metric", "tokens_per_s", "factor", "memory_bytes", "fits")
    assert levers == [tuple(lever[name] for name in names) for lever in said["levers"]]
    assert levers[-1][0] == "near-memory compute"
    energy = [(x.level, x.count, x.unit, x.picojoules, x.joules) for x in one.energy]
    names = ("level", "count", "unit", "picojoules", "joules")
    assert energy == [tuple(level[name] for name in names) for level in said["energy"]]
    assert list(one.notes) == said["notes"]
    assert one.HasField("target") == (said["target"] is not None)
    if said["target"]:
        assert one.target.bandwidth_gbps == said["target"]["bandwidth_gbps"]
        assert one.target.num_gpus == said["target"]["num_gpus"]


def assert_optional(message: Any, name: str, said: dict[str, Any]) -> None:
    assert (getattr(message, name) if message.HasField(name) else None) == said[name], name


async def test_a_model_by_its_size_on_all_gpus(serve: Serve) -> None:
    async with serve() as served:
        size = api.ModelSize(num_parameters=70 * 10**9, num_layers=80, hidden_size=8192, num_kv_heads=8, head_dim=128)
        got = await estimates(
            served, size=size, weight_format="fp8", kv_format="q8_0", batch=16, context=8192, tensor_parallel=4
        )
        sizes = ("--num-layers", "80", "--hidden-size", "8192", "--num-kv-heads", "8", "--head-dim", "128")
        said = roofline(*("--params", "70B", *sizes, "--weights", "fp8", "--kv", "q8_0"), *("-b16", "-c8192", "--tp=4"))
        assert len(got) > 10
        for one, other in zip(got, said, strict=True):
            assert_same(one, other)


async def test_a_config_with_speculation_and_a_target(serve: Serve, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_3_8B))
    async with serve() as served:
        [one] = await estimates(
            served,
            config_json=config.read_text(),
            gpus=["RTX 4090"],
            speculation=api.Speculation(acceptance=0.7, draft_len=5, draft_cost=0.1),
            target_tokens_per_s=100,
        )
        [said] = roofline(
            *("--config", str(config), "--gpu", "rtx4090", "--target", "100"),
            *("--speculative-acceptance", "0.7", "--draft-len", "5", "--draft-cost", "0.1"),
        )
        assert_same(one, said)


@pytest.mark.kernels
async def test_the_model_that_is_served(serve: Serve, tmp_path: Path) -> None:
    model = write_hf(tmp_path / "model", TinyModel())
    config = EngineConfig(backend="cpu", num_threads=1, num_kv_blocks=32)
    async with serve(load=lambda progress: ProfileSession(LLM(str(model), config, progress=progress))) as served:
        [one, here] = await estimates(served, gpus=["h200", "this-machine"])
        assert_same(one, roofline(str(model), "--gpu", "h200")[0])
        bandwidth = here.gpu.peaks[0]
        assert [peak.source for peak in here.gpu.peaks] == [api.FIGURE_SOURCE_MEASURED] * 2
        assert here.prefill.compute_s == pytest.approx(here.prefill.flops / (here.gpu.peaks[1].value * 1e12))
        assert here.decode.memory_s == pytest.approx(one.decode.memory_s * 4800 / bandwidth.value)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"batch": 0, "gpus": ["abacus"], "kv_format": "int2"}, {"batch", "gpus[0]", "kv_format"}),
        ({"size": api.ModelSize()}, {"size.num_parameters"}),
        (
            {"size": api.ModelSize(num_parameters=9, num_layers=0)},
            {"size.num_layers", "size.hidden_size", "size.num_kv_heads", "size.head_dim"},
        ),
        ({"config_json": "{}"}, {"config_json"}),
        ({"target_tokens_per_s": 1e15}, {"target_tokens_per_s"}),
        ({"target_tokens_per_s": 1e6, "size": api.ModelSize(num_parameters=10**15)}, {"target_tokens_per_s"}),
        (
            {"speculation": api.Speculation(acceptance=2, draft_len=99)},
            {"speculation.acceptance", "speculation.draft_len"},
        ),
        ({"target_tokens_per_s": -1, "tensor_parallel": 2**31}, {"target_tokens_per_s", "tensor_parallel"}),
    ],
)
async def test_every_wrong_field_is_named(serve: Serve, fields: dict[str, Any], wrong: set[str]) -> None:
    async with serve() as served:
        error = await failure_of(estimates(served, **fields))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert set(violations(error)) == wrong
        assert (await served.status()).counters.received == 0, "counters are of Generate and Profile"


async def test_a_draft_without_an_acceptance_is_always_refused(serve: Serve) -> None:
    async with serve() as served:
        [one] = await estimates(served, gpus=["h200"], speculation=api.Speculation(draft_len=2, draft_cost=0))
        [plain] = await estimates(served, gpus=["h200"])
        assert one.decode.tokens_per_s == pytest.approx(plain.decode.tokens_per_s), "every draft is free and wasted"
