"""One token's way: the sampler's stages against values by hand and against the engine, shapes and bytes of the step."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import pytest
from rich.console import Console

from numba_engine import LLM, EngineConfig, SamplingParams
from numba_engine.formats import F16, Q8_0
from numba_engine.profiling import ProfileSession
from numba_engine.profiling.explain.answers import answers
from numba_engine.profiling.explain.caches import CacheLevel, cpu_caches
from numba_engine.profiling.explain.close_up import CloseUp, CloseUpStep
from numba_engine.profiling.explain.essay import essay
from numba_engine.profiling.explain.stages import Choice, choose, philox_uniforms
from numba_engine.profiling.explain.walk import (
    Token,
    Walk,
    as_json,
    budget_of,
    cost_of,
    embedding_row,
    fastest,
    near_of,
    phases_of,
)
from tests.reference import sampling as reference
from tests.tiny_models import TinyModel, write_gguf

pytestmark = pytest.mark.kernels

MODEL = TinyModel(vocab_size=352, intermediate_size=128)  # sizes that no backend has to pad
PROMPT = list(range(60, 97))


# ---- stages: by hand -------------------------------------------------------------------------------------------------


def chosen(
    probabilities: list[float], engine_token_id: int = 0, history: tuple[int, ...] = (), **params: object
) -> Choice:
    return choose(
        np.log(np.array(probabilities)).astype(np.float32),
        SamplingParams(**{"seed": 5, **params}),  # type: ignore[arg-type]
        prompt_token_ids=[1],
        output_token_ids=history,
        engine_token_id=engine_token_id,
        piece=lambda token_id: f"t{token_id}",
    )


def left_and_mass(choice: Choice) -> dict[str, tuple[int, float]]:
    return {stage.name: (stage.num_left, round(stage.mass, 6)) for stage in choice.stages}


def test_each_stage_leaves_what_it_should() -> None:
    choice = chosen([0.4, 0.05, 0.3, 0.1, 0.15], top_k=4, top_p=0.9, min_p=0.5)
    # top-k drops 0.05; of the 0.95 left, 0.4 + 0.3 are 0.74 and 0.4 + 0.3 + 0.15 reach 0.89, so 0.1 is needed too …
    assert left_and_mass(choice) == {
        "logits": (5, 1.0),
        "penalties, bias": (5, 1.0),
        "temperature": (5, 1.0),
        "top-k": (4, 0.95),
        "top-p": (4, 0.95),
        "min-p": (2, 0.7),  # … and min-p wants at least 0.2
        "softmax": (2, 0.7),
    }
    assert [(c.token_id, c.text) for c in choice.stages[-1].top] == [(0, "t0"), (2, "t2")]
    assert [c.probability for c in choice.stages[-1].top] == pytest.approx([4 / 7, 3 / 7], rel=1e-6)
    assert [c.probability for c in choice.stages[3].top] == pytest.approx([8 / 19, 6 / 19, 3 / 19, 2 / 19], rel=1e-6)


def test_top_p_stops_as_soon_as_it_is_reached() -> None:
    choice = chosen([0.4, 0.05, 0.3, 0.1, 0.15], top_p=0.8)
    assert left_and_mass(choice)["top-p"] == (3, 0.85)


def test_temperature_sharpens() -> None:
    choice = chosen([0.5, 0.25, 0.25], temperature=0.5)
    scaled = choice.stages[2].top
    assert [c.probability for c in scaled] == pytest.approx([4 / 6, 1 / 6, 1 / 6], rel=1e-6)
    assert [c.token_id for c in scaled] == [0, 1, 2], "ties by lower id"
    assert scaled[0].logit == pytest.approx(2 * math.log(0.5), rel=1e-6)
    assert choice.stages[0].top[0].probability == pytest.approx(0.5, rel=1e-6), "the first stage is before it"


def test_ties_at_the_kth_place_all_stay() -> None:
    assert left_and_mass(chosen([0.4, 0.2, 0.2, 0.2], top_k=2))["top-k"] == (4, 1.0)


def test_greedy_has_no_draw() -> None:
    choice = chosen([0.2, 0.5, 0.3], engine_token_id=1, temperature=0)
    assert (choice.token_id, choice.agrees, choice.greedy, choice.race) == (1, True, True, ())
    assert left_and_mass(choice)["greedy"][0] == 1
    assert not chosen([0.2, 0.5, 0.3], engine_token_id=2, temperature=0).agrees


def test_penalties_and_bias_change_the_logits() -> None:
    adjusted = chosen(
        [math.e**2, math.e, 1.0],
        history=(0, 0),
        repetition_penalty=2.0,
        presence_penalty=0.25,
        frequency_penalty=0.5,
        logit_bias=MappingProxyType({2: 3.0}),
    ).stages[1]
    # token 0: 2 / 2 - 0.25 - 2 * 0.5; token 1, of the prompt: 1 / 2; token 2: 0 + 3
    assert {c.token_id: c.logit for c in adjusted.top} == pytest.approx({2: 3.0, 1: 0.5, 0: -0.25}, rel=1e-6)
    assert adjusted.setting == "repetition 2, presence 0.25, frequency 0.5, bias on 1"


def test_random_numbers_are_philox() -> None:
    # Known answers of Random123 (kat_vectors), counter and key zero.
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox_uniforms(4, seed=0, output_index=0).tolist() == [(word + 0.5) / 2**32 for word in words]
    uneven = philox_uniforms(7, seed=2**64 - 3, output_index=9)
    assert -np.log(uneven) == pytest.approx(reference.exponentials(2**64 - 3, 9, 7), rel=1e-12)


def test_the_race_is_won_by_the_largest_score() -> None:
    choice = chosen([0.25, 0.25, 0.25, 0.25])
    uniforms = philox_uniforms(4, 5, 0)
    assert choice.token_id == int(np.argmax(uniforms)), "with equal probabilities the largest u wins"
    for runner in choice.race:
        assert runner.uniform == uniforms[runner.token_id]
        assert runner.score == pytest.approx(0.25 / -math.log(runner.uniform))


# ---- stages: the engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("explain") / "tiny.gguf"
    return write_gguf(path, MODEL, format=Q8_0, formats={"attn_v": F16})


@pytest.fixture(scope="module")
def llm(model_path: Path) -> LLM:
    return LLM(str(model_path), EngineConfig(backend="cpu", num_threads=2, num_kv_blocks=64, prefix_caching=False))


def run(llm: LLM, params: SamplingParams, *, fusion: bool = True) -> tuple[list[CloseUpStep], list[int]]:
    """Steps and tokens of one request under a close look."""
    steps, tokens = [], []
    session = ProfileSession(llm)
    session.start(fusion=fusion, recorder=CloseUp)
    try:
        for output in llm.stream(PROMPT, params):
            step = session.take_step()
            assert isinstance(step, CloseUpStep)
            steps.append(step)
            tokens += output.token_ids
    finally:
        session.stop()
    return steps, tokens


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
        {"temperature": 2.5, "top_p": 0.6},
        {"temperature": 1.3, "repetition_penalty": 1.4, "frequency_penalty": 0.7, "presence_penalty": -0.5},
        {"temperature": 1.0, "top_k": 3, "logit_bias": MappingProxyType({7: 3.0, 9: 2.5})},
    ],
)
def test_the_drawn_token_is_the_engines(llm: LLM, settings: dict[str, object]) -> None:
    different = set()
    for seed in (0, 11, 2**64 - 1):
        params = SamplingParams(seed=seed, max_tokens=12, ignore_eos=True, **settings)  # type: ignore[arg-type]
        steps, tokens = run(llm, params)
        assert tokens == list(llm.generate([PROMPT], params)[0].token_ids), "looking changes no token"
        assert len(steps) == len(tokens) == 12
        for index, (step, token) in enumerate(zip(steps, tokens, strict=True)):
            assert step.logits is not None
            assert step.logits.shape == (1, MODEL.vocab_size)
            choice = choose(
                step.logits[0],
                params,
                prompt_token_ids=PROMPT,
                output_token_ids=tokens[:index],
                engine_token_id=token,
                piece=str,
            )
            assert choice.token_id == token
            assert choice.agrees
        different.add(tuple(tokens))
    assert (len(different) > 1) == (settings["temperature"] != 0), "the seed matters where there is a draw"


# ---- the step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fusion", [True, False])
def test_calls_stream_the_files_tensors(llm: LLM, model_path: Path, fusion: bool) -> None:
    steps, _ = run(llm, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True), fusion=fusion)
    tensors = {tensor.name: int(tensor.n_bytes) for tensor in gguf.GGUFReader(model_path).tensors}
    row_bytes = Q8_0.row_bytes(MODEL.hidden_size)
    step = steps[-1]
    phases = phases_of(step, MODEL.num_layers)
    assert phases.embedding.one.weight_bytes == row_bytes
    layers = sum(nbytes for name, nbytes in tensors.items() if name.startswith("blk."))
    assert phases.layers.weight_bytes == sum(phase.total.weight_bytes for phase in phases.layer) == layers
    head = tensors["output.weight"] + tensors["output_norm.weight"]
    assert sum(phase.total.weight_bytes for phase in phases.head) == head
    cost = cost_of([step], len(PROMPT) + 2)
    assert cost.weight_bytes == row_bytes + layers + head == sum(op.weight_bytes for op in step.ops)
    assert cost.time_s == pytest.approx(cost.host_time_s + sum(call.op.time_s for call in step.calls))
    matrices = {phase.matrix.name.rpartition(".")[2]: phase.matrix for phase in phases.layer if phase.matrix}
    assert {name: matrix.shape for name, matrix in matrices.items()} == {
        "qkv_proj": (128, 64),
        "o_proj": (64, 64),
        "gate_up_proj": (256, 64),
        "down_proj": (64, 128),
    }
    assert matrices["qkv_proj"].formats == ("Q8_0", "F16")
    assert matrices["down_proj"].nbytes == tensors["blk.0.ffn_down.weight"]


def test_phases_are_the_models_with_its_shapes(llm: LLM) -> None:
    steps, _ = run(llm, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    prefill, decode = (phases_of(step, MODEL.num_layers) for step in steps)
    ends = [(phase.name, phase.inputs.shape, phase.outputs.shape) for phase in decode.layer]
    assert ends == [
        ("norm_qkv_rope_store", (1, 64), (1, 128)),
        ("attention", (1, 128), (1, 64)),
        ("linear_add o_proj", (1, 64), (1, 64)),
        ("norm_gate_up_act", (1, 64), (1, 128)),
        ("linear_add down_proj", (1, 128), (1, 64)),
    ]
    assert [(phase.name, phase.outputs.shape) for phase in decode.head] == [("norm_lm_head", (1, 352))]
    assert (decode.sample.inputs.shape, decode.sample.outputs.shape) == ((1, 352), (1,))
    assert prefill.layer[0].inputs.shape == (len(PROMPT), 64)
    assert prefill.head[0].inputs.shape == (1, 64), "only the last row wants logits"
    assert all(phase.total.num_calls == 2 for phase in decode.layer)
    attention = decode.layer[1]
    assert attention.one.kv_bytes == (len(PROMPT) + 1) * 2 * 2 * 16 * 2  # k and v, 2 heads of 16, float16
    assert attention.one.time_s == pytest.approx(attention.total.time_s / 2)


def test_one_call_is_repeated_and_leaves_no_trace(llm: LLM) -> None:
    steps, tokens = run(llm, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    near = near_of(steps[-1])
    assert near is not None
    assert near.phase == "norm_gate_up_act", "of a layer's, the one that streams most"
    assert near.weight_bytes == 256 * Q8_0.row_bytes(64) + 64 * 4
    assert near.repeated_time_s > 0
    assert near.speedup == near.in_step_time_s / near.repeated_time_s
    assert tokens == list(
        llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].token_ids
    )


def test_fastest_is_one_whole_run(llm: LLM) -> None:
    step = run(llm, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0][-1]
    slower = replace(step, time_s=step.time_s + 1)
    # What looking cost does not count.
    quicker = replace(step, time_s=step.time_s + 1, overhead_s=step.overhead_s + 1 + step.net_time_s / 2)
    assert fastest([slower, step]) is step
    assert fastest([step, quicker, slower]) is quicker


# ---- the walk --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def walk(llm: LLM) -> Walk:
    params = SamplingParams(temperature=0.9, top_k=20, seed=4, max_tokens=2, ignore_eos=True)
    steps, tokens = run(llm, params)
    assert steps[-1].logits is not None
    prefill, decode = cost_of(steps[:1], len(PROMPT)), cost_of(steps[1:], len(PROMPT) + 1)
    phases = phases_of(steps[-1], MODEL.num_layers)

    def token(token_id: int) -> Token:
        return Token(token_id, "[bold]" if token_id == tokens[1] else llm.detokenize([token_id]))

    return Walk(
        model=llm.model_info,
        caches=(CacheLevel("L1", 2, 98_304), CacheLevel("L3", 1, 1_000_000)),
        repetitions=1,
        prompt="abc",
        prompt_tokens=tuple(token(token_id) for token_id in PROMPT),
        first_token=token(tokens[0]),
        prefill=prefill,
        decode=decode,
        embedding=embedding_row(token(tokens[0]), phases.embedding),
        layer_phases=phases.layer,
        layers=phases.layers,
        head_phases=phases.head,
        sample=phases.sample,
        choice=choose(
            steps[-1].logits[0],
            params,
            prompt_token_ids=PROMPT,
            output_token_ids=tokens[:1],
            engine_token_id=tokens[1],
            piece=lambda token_id: token(token_id).text,
        ),
        token=token(tokens[1]),
        text="xy",
        budget=budget_of(decode, [prefill], read_bandwidth_gbps=25.0, unwatched_time_s=0.002),
        recompute=prefill,
        wide=prefill,
        near=near_of(steps[-1]),
    )


def rendered(walk: Walk) -> str:
    console = Console(width=120, no_color=True, file=io.StringIO())
    with console.capture() as capture:
        console.print(essay(walk))
    return capture.get()


def test_budget_is_bytes_over_bandwidth(walk: Walk) -> None:
    budget, decode = walk.budget, walk.decode
    assert budget.memory_bytes == decode.weight_bytes + decode.kv_bytes
    assert budget.floor_s == pytest.approx(budget.memory_bytes / 25e9)
    assert budget.share_of_floor == pytest.approx(budget.floor_s / decode.time_s)
    assert budget.best_gflops == max(decode.best_gflops, walk.prefill.best_gflops)
    assert budget.idle_share == pytest.approx(1 - decode.flops / (budget.best_gflops * 1e9) / decode.time_s)


def test_the_essay_has_the_models_own_shapes(walk: Walk) -> None:
    lines = " ".join(rendered(walk).split())
    for shapes in (
        "residual [1, 64] × [128, 64] Q8_0+F16 → qkv [1, 128]",
        "x [1, 128] × [64, 128] Q8_0 → residual [1, 64]",
        "last [1, 64] × [352, 64] Q8_0 → logits [1, 352]",
        "the embedding table [352, 64] (Q8_0, 23.9 kB). 68 bytes",
        "through 2 layers",
        "4 heads of 16, 2 to each of 2 KV heads",
    ):
        assert shapes in lines
    assert "tied" not in lines
    assert "[bold]" in lines, "a token's text is never markup"
    assert "never sorts, chose token" in lines


def test_a_draw_that_differs_is_said_loudly(walk: Walk) -> None:
    other = replace(walk.choice, engine_token_id=(walk.choice.token_id + 1) % MODEL.vocab_size)
    assert "This is a bug" in rendered(replace(walk, choice=other))
    assert "This is a bug" not in rendered(walk)


def test_five_questions_are_answered_by_figures_of_the_run(walk: Walk) -> None:
    said = answers(walk)
    assert len(said) == 5
    moved, near, too_small, spread, saved = (answer.figures for answer in said)
    assert moved["resident_weight_bytes"] == walk.model.weight_bytes
    assert moved["moved_weight_bytes"] == walk.decode.weight_bytes
    assert walk.near is not None
    assert near["speedup"] == walk.near.speedup
    assert too_small["cache_bytes"] == 1_098_304
    assert too_small["large_model_token_s"] == pytest.approx(140 / 25)
    assert "one part in 127,469" in said[2].text
    assert "do fit" in said[2].text
    large = answers(replace(walk, model=replace(walk.model, weight_bytes=4 * 1_098_304)))
    assert "4.0 times what they hold" in large[2].text
    assert spread["prefill_weight_bytes_per_token"] == pytest.approx(walk.prefill.weight_bytes / len(PROMPT))
    assert saved["decode_kv_bytes"] == walk.decode.kv_bytes
    assert saved["recompute_flops"] > 20 * saved["decode_flops"]


def test_a_device_of_unknown_caches_still_answers(walk: Walk) -> None:
    third = answers(replace(walk, caches=()))[2]
    assert "140.0 GB" in third.text
    assert "cache_bytes" not in third.figures


def test_a_device_that_repeats_nothing_still_answers(walk: Walk) -> None:
    second = answers(replace(walk, near=None))[1]
    assert (second.short, second.figures) == ("Operands loaded near it.", {})


def test_a_simulators_times_prove_nothing(walk: Walk) -> None:
    simulated = replace(walk, model=replace(walk.model, backend="ptx"), near=None)
    for answer in answers(simulated):
        assert not [name for name in answer.figures if name.endswith("_s")], answer
        assert " ms" not in answer.text
        assert " µs" not in answer.text
    text = " ".join(rendered(simulated).split())
    assert text.count("This GPU is simulated") == 2
    assert "Times are predicted; bytes" in text
    assert "achieved" not in text
    assert "achieved" in rendered(walk)


def test_json_is_complete(walk: Walk) -> None:
    said = json.loads(json.dumps(as_json(walk), allow_nan=False))
    assert said["budget"]["idle_share"] == walk.budget.idle_share, "what follows from the fields is there too"
    assert said["layer_phases"][0]["total"]["gbps"] == walk.layer_phases[0].total.gbps
    assert said["choice"]["agrees"] is True
    assert [stage["name"] for stage in said["choice"]["stages"]][:2] == ["logits", "penalties, bias"]
    assert json.loads(json.dumps(as_json(answers(walk))))[0]["figures"]["time_s"] == walk.decode.time_s


# ---- caches ----------------------------------------------------------------------------------------------------------


def cache_files(folder: Path, caches: Iterator[tuple[int, int, str, str, str, str]]) -> None:
    for core, index, level, kind, size, shared_by in caches:
        cache = folder / f"cpu{core}" / "cache" / f"index{index}"
        cache.mkdir(parents=True)
        contents = {"level": level, "type": kind, "size": size, "shared_cpu_list": shared_by}
        for name, text in contents.items():
            (cache / name).write_text(text + "\n")


def test_a_shared_cache_counts_once(tmp_path: Path) -> None:
    per_core = ((core, i, *rest) for core in (0, 1, 2) for i, rest in enumerate(
        [("1", "Data", "48K", str(core)), ("1", "Instruction", "32K", str(core)), ("2", "Unified", "1024K", str(core)),
         ("3", "Unified", "32M", "0-1" if core < 2 else "2")]
    ))  # fmt: skip
    cache_files(tmp_path, per_core)
    assert cpu_caches(tmp_path, [0, 1]) == (
        CacheLevel("L1", 2, 2 * 48 * 1024),
        CacheLevel("L2", 2, 2 << 20),
        CacheLevel("L3", 1, 32 << 20),
    )
    assert cpu_caches(tmp_path, [1, 2])[2] == CacheLevel("L3", 2, 64 << 20)


def test_unknown_caches_are_none(tmp_path: Path) -> None:
    assert cpu_caches(tmp_path, [0]) == ()
    cache_files(tmp_path, iter([(0, 0, "1", "Data", "", "0"), (0, 1, "2", "Unified", "12X", "0")]))
    assert cpu_caches(tmp_path, [0]) == ()
