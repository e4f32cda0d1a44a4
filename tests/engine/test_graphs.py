"""Decode steps on the CPU as graphs: the tokens of steps run op by op, each step two compiled calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numba_engine import SamplingParams
from numba_engine.backends.cpu import commands
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.profiling import ProfileSession
from tests.engine.conftest import MakeLLM
from tests.engine.random_requests import check_random_requests, random_settings

PROMPT = list(range(40, 60))


@pytest.fixture(scope="session")
def graph() -> bool:
    """What the tests here do not set themselves."""
    return True


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_a_request_gets_its_own_tokens(make_llm: MakeLLM, seed: int) -> None:
    rng = np.random.default_rng(seed)
    check_random_requests(make_llm(**random_settings(rng)), make_llm(graph=False), rng)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1, seed=5, repetition_penalty=1.2, max_tokens=40, ignore_eos=True, logprobs=3),
    ],
    ids=["greedy", "penalties and log-probabilities"],
)
def test_a_decode_step_is_two_compiled_calls(
    make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch, params: SamplingParams
) -> None:
    """The forward pass and the draw, also where a sequence grows by a block."""
    calls = counted_calls(monkeypatch)
    llm = make_llm()
    llm.generate([PROMPT, PROMPT[:7]], params)  # captures what there is to capture
    llm.add_request("a", PROMPT, params)
    llm.add_request("b", PROMPT[:7], params)
    per_step = []
    while llm.has_unfinished:
        calls.clear()
        llm.step()
        per_step.append(list(calls))
    assert set(per_step[0]) == {"op"}, "the prompts"
    assert per_step[1:] == [["graph", "graph"]] * 39


def test_without_graphs_every_op_is_a_call(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted_calls(monkeypatch)
    llm = make_llm(graph=False)
    llm.add_request("a", PROMPT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    llm.step()
    calls.clear()
    llm.step()
    assert set(calls) == {"op"}
    assert len(calls) == 5 * llm.model_info.num_layers + 3, "five per layer, and embedding, LM head and draw"
    llm.abort("a")


def test_profiled_steps_run_op_by_op_and_give_the_same_tokens(make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    llm = make_llm()
    expected = llm.generate([PROMPT], params)[0].token_ids
    session = ProfileSession(llm)
    session.start()
    assert llm.generate([PROMPT], params)[0].token_ids == expected
    summary = session.stop()
    assert summary.num_decode_steps == 7


def counted_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that Python calls compiled ops."""
    calls: list[str] = []
    run_calls, call = commands.run_calls, CpuBackend.call

    def run_graph(*args: int) -> None:
        calls.append("graph")
        run_calls(*args)

    def run_op(backend: CpuBackend, command: commands.Command, *words: Any) -> None:
        calls.append("op")
        call(backend, command, *words)

    monkeypatch.setattr(commands, "run_calls", run_graph)
    monkeypatch.setattr(CpuBackend, "call", run_op)
    return calls
