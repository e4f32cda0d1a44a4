"""CudaDevice over a fake driver: parameter packing, memory, views, errors; and a whole engine through it."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from numba_engine import LLM, EngineConfig, SamplingParams, backends
from numba_engine.backends.cuda import availability, cuda_device
from numba_engine.backends.cuda.cuda_device import CudaDevice
from numba_engine.backends.ptx import PtxDevice
from numba_engine.config import BackendName
from numba_engine.errors import BackendUnavailableError, OutOfMemoryError
from numba_engine.formats import Q8_0
from tests.kernels.cuda.fake_cupy import fake_cupy
from tests.models.cases import CASES, PROMPT
from tests.tiny_models import write_gguf

POOL_BYTES = 1 << 26


@pytest.fixture
def make_device(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CudaDevice]:
    def make(**options: bool) -> CudaDevice:
        modules = fake_cupy(PtxDevice((9, 0), memory_bytes=1 << 29), pool_bytes=POOL_BYTES, **options)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(cuda_device, "find_ptxas", lambda: None)  # the fake driver takes PTX only
        return CudaDevice()

    return make


def test_it_says_what_it_is(make_device: Callable[..., CudaDevice]) -> None:
    device = make_device()
    assert (device.name, device.compute_capability, device.multiprocessors) == ("Fake GPU", (9, 0), 132)


def test_memory_goes_there_and_back_and_views_share_it(make_device: Callable[..., CudaDevice]) -> None:
    device = make_device()
    host = np.arange(60, dtype=np.float32).reshape(5, 3, 4)
    array = device.upload(host)
    np.testing.assert_array_equal(device.download(array), host)
    np.testing.assert_array_equal(device.download(array[1:4]), host[1:4])
    np.testing.assert_array_equal(device.download(array[2:][1:].reshape(24)), host[3:].reshape(24))
    np.testing.assert_array_equal(device.download(array.view(np.uint32)), host.view(np.uint32).reshape(-1))
    device.write(array[4:], np.zeros((1, 3, 4), np.float32))
    assert (device.download(array)[4] == 0).all()
    assert device.download(device.upload(np.empty((0, 7), np.int32))).shape == (0, 7)


def test_a_model_that_does_not_fit_is_refused_with_the_numbers(make_device: Callable[..., CudaDevice]) -> None:
    device = make_device()
    with pytest.raises(
        OutOfMemoryError, match=r"lm_head needs 268,435,456 bytes .* 67,109,064 of 134,217,728 are free"
    ):
        device.empty((1 << 26,), np.float32, "lm_head")


def test_a_driver_older_than_cupy_wants_is_explained(make_device: Callable[..., CudaDevice]) -> None:
    with pytest.raises(BackendUnavailableError, match=r"numba-engine\[cuda12\] or \[cuda13\]"):
        make_device(driver_is_too_old=True)


def test_the_engine_runs_on_it(
    make_device: Callable[..., CudaDevice], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From a thread that did not make the device, as the service does; auto takes it where it is usable."""
    make_device()
    monkeypatch.setattr(availability, "_compute_capability", lambda: (9, 0))
    monkeypatch.setattr(availability, "require_packages", lambda *arguments: None)
    model = write_gguf(tmp_path / "model.gguf", CASES["llama_gqa1_dim64"], format=Q8_0)
    replayed = SamplingParams(temperature=0.8, seed=5, max_tokens=4, ignore_eos=True)
    launched_anew = dataclasses.replace(replayed, repetition_penalty=1.2)

    def tokens(backend: BackendName) -> tuple[str, list[tuple[int, ...]]]:
        config = EngineConfig(backend=backend, activation_dtype="float32", num_kv_blocks=16)
        llm = LLM(str(model), config)
        found: list[tuple[int, ...]] = []
        for params in (replayed, launched_anew):
            run = partial(lambda params: found.append(llm.generate([PROMPT[:5]], params)[0].token_ids), params)
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
        return llm.model_info.device_name, found

    on_gpu = tokens("auto")
    assert on_gpu[0] == "Fake GPU"
    assert on_gpu[1] == tokens("cpu")[1]


def test_auto_takes_the_cpu_where_no_gpu_is_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(availability, "_compute_capability", lambda: (7, 5))
    assert backends.create_backend(EngineConfig(backend="auto", num_threads=1)).name == "cpu"
