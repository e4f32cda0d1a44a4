"""Decode steps captured and replayed, as the engine runs them: the same tokens, no copies, few launches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

from numba_engine import LLM, EngineConfig, FinishReason, SamplingParams
from numba_engine.backends.capture import Graph
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.config import BackendName
from numba_engine.execution.decode_state import ForwardSize, SampleSize
from numba_engine.formats import BF16
from tests.models.cases import PROMPT
from tests.tiny_models import TinyModel, write_hf

MakeLLM = Callable[..., LLM]

BACKENDS = ["ptx", pytest.param("cuda", marks=pytest.mark.cuda)]
MODEL = TinyModel(num_layers=1, num_heads=2, num_kv_heads=1, head_dim=64, max_position=512, seed=11)


@pytest.fixture(scope="module")
def make_llm(tmp_path_factory: pytest.TempPathFactory) -> MakeLLM:
    """Engines over the tiny model, in a format that the phases fuse.

    Equal ones are one: on the executor, loading its kernels is most of the work.
    """
    model = str(write_hf(tmp_path_factory.mktemp("tiny") / "llama", MODEL, format=BF16))

    @cache
    def make(backend: BackendName, *, fusion: bool = True) -> LLM:
        settings: dict[str, Any] = {"activation_dtype": "float32", "num_kv_blocks": 64, "prefix_caching": False}
        return LLM(model, EngineConfig(backend=backend, fusion=fusion, **settings))

    return make


def seeded(max_tokens: int, **sampling: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.9, "seed": 2**64 - 3, "ignore_eos": True, "max_tokens": max_tokens} | sampling
    )


def graphs_of(llm: LLM) -> tuple[dict[ForwardSize, Graph], dict[SampleSize, Graph]]:
    graphs = llm.engine._runner._graphs
    assert graphs is not None
    return graphs._forward_graphs, graphs._sample_graphs


def plain(llm: LLM) -> set[int]:
    """Launches of the steps that sample nothing but tokens: of their two graphs together."""
    forward, sample = graphs_of(llm)
    return {
        graph.num_launches + sample[SampleSize(size.num_rows, False, -1)].num_launches
        for size, graph in forward.items()
        if not size.changes_logits
    }


@contextmanager
def copies_counted(llm: LLM) -> Iterator[Counter[str]]:
    """Calls of the device that move data to or from the host."""
    assert isinstance(llm.engine.backend, CudaBackend)
    device, counts = llm.engine.backend.device, Counter[str]()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("upload", "write", "download", "empty", "download_later"):

            def counted(name: str, call: Any, *args: Any, **options: Any) -> Any:
                counts[name] += 1
                return call(*args, **options)

            patch.setattr(device, name, partial(counted, name, getattr(device, name)))
        yield counts


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fusion", [True, False])
def test_tokens_are_the_cpus_through_joins_leaves_and_longer_contexts(
    backend: BackendName, fusion: bool, make_llm: MakeLLM
) -> None:
    """One crosses the longest context of the first graphs; one joins, one leaves, one stops."""
    long = [*PROMPT, *reversed(PROMPT)] * 4
    long = long[:251]
    cpu = make_llm("cpu")
    asked = {
        "long": (long, seeded(11)),
        "greedy": (PROMPT[:14], seeded(9, temperature=0)),
        "joins": (PROMPT[5:11], seeded(6, top_k=7, top_p=0.9)),
        "leaves": (PROMPT[:3], seeded(50, min_p=0.01)),
    }
    expected = {name: cpu.generate(prompt, own)[0].token_ids for name, (prompt, own) in asked.items()}
    stop = expected["joins"][3]
    assert stop not in expected["joins"][:3]
    asked["joins"] = asked["joins"][0], seeded(6, top_k=7, top_p=0.9, stop_token_ids=(stop,))

    llm = make_llm(backend, fusion=fusion)
    got: dict[str, list[int]] = {name: [] for name in asked}
    for name in ("long", "greedy", "leaves"):
        llm.add_request(name, *asked[name])
    index = 0
    while llm.has_unfinished:
        if index == 3:
            llm.add_request("joins", *asked["joins"])
        if index == 7:
            llm.abort("leaves")
        for output in llm.step():
            got[output.request_id] += output.token_ids
            if output.request_id == "joins" and output.finished:
                assert output.finish_reason is FinishReason.STOP_TOKEN
        index += 1
    assert tuple(got["long"]) == expected["long"]
    assert tuple(got["greedy"]) == expected["greedy"]
    assert tuple(got["joins"]) == expected["joins"][:4]
    assert tuple(got["leaves"]) == expected["leaves"][: len(got["leaves"])]
    assert len(got["leaves"]) == 7
    assert {(4, 256), (2, 512)} <= {(size.num_rows, size.max_context_len) for size in graphs_of(llm)[0]}
    assert llm.stats.num_free_kv_blocks == llm.stats.num_kv_blocks


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replay_copies_nothing_but_the_token_read(backend: BackendName, make_llm: MakeLLM) -> None:
    """And a block table's row where a sequence grows by a block; nothing is allocated either."""
    llm = make_llm(backend)
    llm.add_request("a", PROMPT[:9], seeded(30))
    llm.add_request("b", PROMPT[:12], seeded(30))
    for _ in range(3):
        llm.step()
    grown = []
    for step in range(10):
        with copies_counted(llm) as counts:
            assert len(llm.step()) == 2
        grown.append(counts.pop("write", 0))
        assert counts == {"download_later": 1}, f"step {step}"
    # Step n, counted from that of the prompts, launches position length + n: it is 16 for b in step 4, for a in step 7.
    assert grown == [0, 1, 0, 0, 1, 0, 0, 0, 0, 0]
    for name in "ab":
        llm.abort(name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_penalties_biases_and_log_probabilities_are_captured_too(backend: BackendName, make_llm: MakeLLM) -> None:
    """What one row wants the others do not notice; lists grow on the device; then all is as without."""
    prompts = [PROMPT[:7], PROMPT[3:9], PROMPT[:12]]
    wishes = [
        seeded(8, repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.4),
        seeded(5, logit_bias={5: 7.5, 77: -100.0, 200: 6.0}, logprobs=3),
        seeded(11),
    ]
    cpu, llm = make_llm("cpu"), make_llm(backend)
    for _ in range(2):
        together = llm.generate(prompts, wishes)
        for got, prompt, own in zip(together, prompts, wishes, strict=True):
            expected = cpu.generate(prompt, own)[0]
            assert got.token_ids == expected.token_ids
            assert len(got.logprobs) == len(expected.logprobs)
            for position, right in zip(got.logprobs, expected.logprobs, strict=True):
                ours, theirs = (position.chosen, *position.top), (right.chosen, *right.top)
                assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
                logprobs = [entry.logprob for entry in theirs]
                np.testing.assert_allclose([entry.logprob for entry in ours], logprobs, rtol=0, atol=1e-4)
    kinds = {(size.changes_logits, size.num_top_logprobs) for size in graphs_of(llm)[1]}
    assert {(True, 5), (True, -1), (False, -1)} <= kinds


@pytest.mark.parametrize("backend", BACKENDS)
def test_launches_of_a_textbook_step(backend: BackendName, make_llm: MakeLLM) -> None:
    """The embedding; ten ops a layer; the rows, their norm and the LM head; the draw, and the step onward."""
    llm = make_llm(backend, fusion=False)
    llm.generate(PROMPT[:5], seeded(3))
    assert plain(llm) == {10 * MODEL.num_layers + 6}


@pytest.mark.parametrize("backend", BACKENDS)
def test_launches_of_a_fused_step(backend: BackendName, make_llm: MakeLLM) -> None:
    """Five kernels a layer, and the embedding, the LM head, the draw and the step onward."""
    llm = make_llm(backend)
    llm.generate(PROMPT[:5], seeded(3))
    assert max(plain(llm)) <= 5 * MODEL.num_layers + 4
