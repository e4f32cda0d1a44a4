"""A request whose logits are no numbers ends with an error that says what to do, and ends nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from numba_engine import LLM, EngineConfig, NonFiniteLogitsError, RequestOutput, SamplingParams
from numba_engine.engine.request import logprobs_of_row
from numba_engine.execution.sampling import SampledTokens
from numba_engine.text.parts import TokenizerParts
from numba_engine.text.tokenizer import Tokenizer
from tests import tiny_models
from tests.engine.deferred_backend import DeferredBackend
from tests.tiny_models import TinyModel, write_hf

BAD = 7
"""A token whose values are beyond float16."""
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={BAD: -100.0})
MEETS_BAD = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={BAD: 100.0})


def write(directory: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[str, np.ndarray], np.ndarray]) -> str:
    """A tiny model whose tensors are changed."""
    original = tiny_models.tiny_tensors
    monkeypatch.setattr(
        tiny_models, "tiny_tensors", lambda model: {name: change(name, t) for name, t in original(model).items()}
    )
    return str(write_hf(directory / "model", TinyModel(num_layers=1)))


def with_bad_token(directory: Path, monkeypatch: pytest.MonkeyPatch, factor: float) -> str:
    """Only the bad token has anything in element 0 of its embedding, and values are that large by it."""

    def change(name: str, tensor: np.ndarray) -> np.ndarray:
        if "embed_tokens" in name:
            tensor[:, 0] = 0
            tensor[BAD, 0] = 3
        if "v_proj" in name:
            tensor[:, 0] *= np.float32(factor)
        return tensor

    return write(directory, monkeypatch, change)


@pytest.mark.parametrize("projection", ["k_proj", "v_proj"])
@pytest.mark.parametrize("logprobs", [None, 3])
def test_keys_or_values_beyond_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, projection: str, logprobs: int | None
) -> None:
    model = write(tmp_path, monkeypatch, lambda name, t: t * np.float32(1e6) if projection in name else t)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=logprobs)
    with pytest.raises(NonFiniteLogitsError, match="--kv-cache-dtype float32"):
        LLM(model, EngineConfig(num_threads=1)).generate([[5, 6, 9]], params)
    (wide,) = LLM(model, EngineConfig(num_threads=1, kv_cache_dtype="float32")).generate([[5, 6, 9]], params)
    assert len(wide.token_ids) == 3
    assert all(np.isfinite(p.chosen.logprob) for p in wide.logprobs)


@pytest.mark.parametrize("deferred", [False, True], ids=["cpu", "launched ahead"])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_only_the_request_itself_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deferred: bool, logprobs: int | None
) -> None:
    if deferred:
        monkeypatch.setattr("numba_engine.engine.loading.create_backend", DeferredBackend)
    llm = LLM(with_bad_token(tmp_path, monkeypatch, 1e7), EngineConfig(num_threads=1, max_num_seqs=4))
    params = SamplingParams(**{**asdict(GREEDY), "logprobs": logprobs})
    (alone,) = llm.generate([[5, 6]], params)
    llm.add_request("good", [5, 6], params)
    llm.add_request("prompt", [5, BAD], params)
    llm.add_request("output", [5, 9], SamplingParams(**{**asdict(MEETS_BAD), "logprobs": logprobs}))
    outputs: dict[str, list[RequestOutput]] = {"good": [], "prompt": [], "output": []}
    while llm.has_unfinished:
        for output in llm.step():
            outputs[output.request_id].append(output)
    merged = {name: RequestOutput.merged(those) for name, those in outputs.items()}
    assert merged["good"].token_ids == alone.token_ids
    assert merged["good"].error is None
    assert merged["prompt"].token_ids == ()
    assert merged["output"].token_ids == (BAD,)
    for name in ("prompt", "output"):
        assert merged[name].finished
        assert merged[name].finish_reason is None
        assert "float16" in (merged[name].error or "")
        assert merged[name].timings is not None
        json.dumps(asdict(merged[name]), allow_nan=False)
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks
    assert llm.stats.num_finished == 4
    assert llm.generate([[5, 6]], params)[0].token_ids == alone.token_ids


def test_generate_and_stream_raise_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_bad_token(tmp_path, monkeypatch, 3e38)
    llm = LLM(model, EngineConfig(num_threads=1, kv_cache_dtype="float32"))
    with pytest.raises(NonFiniteLogitsError, match="weights or activations"):
        llm.generate([[5, 6], [BAD]], GREEDY)
    stream = llm.stream([5, 9], MEETS_BAD)
    assert next(stream).token_ids == (BAD,)
    with pytest.raises(NonFiniteLogitsError):
        next(stream)
    assert not llm.has_unfinished


def test_a_model_that_can_choose_nothing_for_the_warm_up_still_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write(tmp_path, monkeypatch, lambda name, t: t * np.float32(1e6) if "v_proj" in name else t)
    llm = LLM(model, EngineConfig(num_threads=1))
    llm.warm_up()
    assert llm.stats.num_finished == 0


def test_only_likeliest_tokens_that_can_be_chosen_have_a_logprob() -> None:
    sampled = SampledTokens(
        token_ids=np.array([1], np.int32),
        logprobs=np.array([-0.5], np.float32),
        top_token_ids=np.array([[1, 2, 0, -1]], np.int32),
        top_logprobs=np.array([[-0.5, -0.9, -np.inf, np.nan]], np.float32),
    )
    position = logprobs_of_row(
        sampled, 0, 4, Tokenizer(TokenizerParts("tiny", tiny_models.tiny_tokenizer(), None, None))
    )
    assert position is not None
    assert [entry.token_id for entry in position.top] == [1, 2]
