"""The card of every kernel that a model may launch: found by running all, not by a list of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from numba_engine.backends.cuda.arrays import CudaArray
from numba_engine.backends.cuda.backend import CudaBackend
from numba_engine.backends.cuda.kernels import read_bandwidth
from numba_engine.backends.sampling import Sampled, Sampling
from numba_engine.formats import FORMATS, Format
from numba_engine.kernel_lab.cards import KernelCard, kernel_card
from numba_engine.kernel_lab.observed import ObservedLaunch, ObservingDevice
from numba_engine.kernel_lab.observed_model import MODELS, TABLE, WEIGHT, ObservedModel
from numba_engine.model.config import QK_NORMS, QKV_BIAS

FEW_ROWS = (1, 2, 4, 8)
"""Rows of activations for which every weight byte shall be read once."""
_CONTEXT, _PROMPT = 384, 70

# Heads as Llama-3-8B's, rows as long or a quarter of it, and enough of them for some blocks.
_LLAMA = MODELS["llama-3-8b"]
_LAYER = replace(
    _LLAMA.layers[0],
    attention=replace(_LLAMA.layers[0].attention, num_heads=8, num_kv_heads=2),
    intermediate_size=3584,
)
_SLICE = replace(_LLAMA, layers=(_LAYER,), vocab_size=4096)
_EXTRAS = replace(
    _SLICE,
    hidden_size=1024,
    layers=(replace(_LAYER, intermediate_size=1024, optional_tensors=QKV_BIAS | QK_NORMS),),
)


def kernel_cards(
    cc: tuple[int, int],
    wanted: Callable[[str], bool] = lambda name: True,
    formats: Sequence[Format] = tuple(FORMATS.values()),
    rows: Sequence[int] = FEW_ROWS,
) -> list[KernelCard]:
    """Cards of all kernels (or those whose name passes), in the order a forward pass first uses them.

    Raises BackendUnavailableError if ptxas is missing.
    """
    device = ObservingDevice(cc, wanted=wanted, samples=1)
    few_rows: list[ObservedLaunch] = []
    for format in formats:
        model = ObservedModel(device, _SLICE, format)
        for num_seqs in rows:
            few_rows += model.decode(num_seqs, _CONTEXT)
        model.prefill(_PROMPT)
    textbook = ObservedModel(device, _SLICE, formats[0], fusion=False, kv_cache_dtype="float32")
    few_rows += textbook.decode(1, _CONTEXT)
    textbook.prefill(_PROMPT)
    for fusion in (True, False):
        ObservedModel(device, _EXTRAS, formats[0], fusion=fusion).decode(1, _CONTEXT)
    _sample_with_everything(textbook.backend)
    read_bandwidth.launch(textbook.backend, textbook.backend.upload(np.zeros(1 << 18, np.uint32)), blocks=32)
    names = dict.fromkeys(launch.kernel.name for launch in device.observed)
    return [
        kernel_card(
            [launch for launch in device.observed if launch.kernel.name == name],
            weight=WEIGHT,
            table=TABLE,
            few_rows=[launch for launch in few_rows if launch.kernel.name == name],
        )
        for name in names
    ]


def _sample_with_everything(backend: CudaBackend) -> None:
    """Every filter and penalty, and log-probabilities."""

    def one(value: float, dtype: type[np.generic]) -> CudaArray:
        return backend.upload(np.array([value], dtype))

    history = np.arange(0, _SLICE.vocab_size, 61, dtype=np.int32)
    sampling = Sampling(
        temperature=one(0.8, np.float32),
        top_k=one(50, np.int32),
        top_p=one(0.9, np.float32),
        min_p=one(0.01, np.float32),
        repetition_penalty=one(1.1, np.float32),
        presence_penalty=one(0.1, np.float32),
        frequency_penalty=one(0.1, np.float32),
        seed=one(7, np.uint64),
        output_index=one(3, np.uint32),
        history_begins=one(0, np.int32),
        history_ends=one(history.size, np.int32),
        history=backend.upload(history),
        history_prompt_lens=one(32, np.int32),
        bias_begins=one(0, np.int32),
        bias_ends=one(1, np.int32),
        bias_token_ids=one(11, np.int32),
        bias_values=one(0.5, np.float32),
        changes_logits=True,
    )
    logits = np.random.default_rng(0).standard_normal((1, _SLICE.vocab_size), dtype=np.float32)
    sampled = Sampled(
        token_ids=backend.empty((1,), np.dtype(np.int32)),
        logprobs=backend.empty((1,), np.dtype(np.float32)),
        top_token_ids=backend.empty((1, 2), np.dtype(np.int32)),
        top_logprobs=backend.empty((1, 2), np.dtype(np.float32)),
    )
    backend.sample(sampled, backend.upload(logits), sampling)
