"""The whole engine on the CUDA backend: transformers' logits, and the CPU backend's tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from numba_engine import LLM, EngineConfig, SamplingParams
from numba_engine.config import BackendName
from numba_engine.formats import Q4_1
from tests.golden.forward import Forward
from tests.models.cases import CASES, GOLDEN_FILE, POSITIONS, PROMPT
from tests.tiny_models import write_gguf, write_hf

BACKENDS = ["ptx", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_logits_agree_with_transformers(name: str, backend: BackendName, tmp_path: Path) -> None:
    config = EngineConfig(backend=backend, activation_dtype="float32")
    forward = Forward.load(write_hf(tmp_path / "hf", CASES[name]), config, max_tokens=len(PROMPT))
    with np.load(GOLDEN_FILE) as golden:
        np.testing.assert_allclose(forward.logits(PROMPT, POSITIONS), golden[name], rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_do_not_depend_on_batch_or_chunks(backend: BackendName, tmp_path: Path) -> None:
    model = write_gguf(tmp_path / "model.gguf", CASES["llama_gqa3_dim64_tied"], format=Q4_1)
    prompts = [PROMPT[:9], PROMPT, PROMPT[20:], PROMPT[5:6]]
    params = [SamplingParams(max_tokens=4, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 0.0, 1.0, 0.8)]

    def tokens(config: EngineConfig, *, together: bool) -> list[tuple[int, ...]]:
        llm = LLM(str(model), config)
        if together:
            return [completion.token_ids for completion in llm.generate(prompts, params)]
        return [llm.generate([prompt], own)[0].token_ids for prompt, own in zip(prompts, params, strict=True)]

    config = EngineConfig(backend=backend, activation_dtype="float32", num_kv_blocks=64, prefix_caching=False)
    chunked = EngineConfig(
        backend=backend, activation_dtype="float32", num_kv_blocks=64, prefix_caching=False, max_num_batched_tokens=7
    )
    on_cpu = EngineConfig(backend="cpu", activation_dtype="float32", num_kv_blocks=64, num_threads=2)
    together = tokens(config, together=True)
    assert together == tokens(config, together=False)
    assert together == tokens(chunked, together=True)
    assert together == tokens(on_cpu, together=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_demo_model_says_what_it_says_on_the_cpu(backend: BackendName, demo_path: Path) -> None:
    """A prefill, then decode steps captured and replayed."""
    num_tokens = 3 if backend == "ptx" else 32
    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens),
        SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=7, max_tokens=num_tokens),
    ]
    prompts = ["The capital of France is", "Once upon"]

    def run(name: BackendName) -> tuple[LLM, list[tuple[int, ...]]]:
        llm = LLM(str(demo_path), EngineConfig(backend=name, activation_dtype="float32", num_kv_blocks=64))
        return llm, [completion.token_ids for completion in llm.generate(prompts, params)]

    _, on_cpu = run("cpu")
    assert all(on_cpu)
    llm, on_gpu = run(backend)
    assert on_gpu == on_cpu
    graphs = llm.engine._runner._graphs
    assert graphs is not None
    assert [size.num_rows for size in graphs._forward_graphs] == [2]
    assert [size.num_rows for size in graphs._sample_graphs] == [2]
