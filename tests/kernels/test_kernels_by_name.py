"""Kernels are found by their op's name and take its arguments; where there is none for a fused op, it is composed."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import numpy as np
import pytest

from numba_engine.backends.arrays import Norm
from numba_engine.backends.base import OPS
from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.backends.layers import GatedMlp
from numba_engine.config import EngineConfig
from numba_engine.formats import BF16, quantize

PACKAGES = ("cpu", "cuda")
COMPOSED = ("linear_norm_add",)  # fused ops that have no kernel


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", [name for name in OPS if name not in COMPOSED])
def test_a_launch_has_the_signature_of_its_op(name: str, package: str) -> None:
    module = importlib.import_module(f"numba_engine.backends.{package}.kernels.{name}")
    _, *wanted = inspect.signature(OPS[name].compose).parameters.values()
    for function in (module.launch, getattr(module, "supports", module.launch)):
        backend, *parameters = inspect.signature(function).parameters.values()
        assert backend.name == "backend"
        assert parameters == wanted


def test_a_fused_op_without_a_kernel_is_composed(backend: CpuBackend) -> None:
    assert not any(backend.fuses(OPS[name]) for name in COMPOSED)
    assert all(OPS[name].is_fused for name in COMPOSED)


def test_without_fusion_no_fused_op_has_a_kernel(backend: CpuBackend) -> None:
    unfused = CpuBackend(EngineConfig(num_threads=1, fusion=False))
    assert {name for name, op in OPS.items() if op.is_fused and backend.fuses(op)} == {
        "norm_qkv_rope_store", "norm_gate_up_act", "norm_lm_head"
    }  # fmt: skip
    assert not any(unfused.fuses(op) for op in OPS.values() if op.is_fused)


@pytest.mark.parametrize(("intermediate", "composed"), [(32, False), (24, True)])
def test_a_fused_op_is_composed_where_its_kernel_does_not_support_it(
    backend: CpuBackend, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, intermediate: int, composed: bool
) -> None:
    """24 are not whole groups of rows."""
    ran: list[str] = []
    kernels = backend._kernels
    run = kernels.run

    def noted(backend: CpuBackend, op: Any, args: tuple[Any, ...]) -> Any:
        ran.append(op.name)
        return run(backend, op, args)

    monkeypatch.setattr(kernels, "run", noted)
    gate_up = [quantize("w", rng.standard_normal((intermediate, 64), dtype=np.float32), BF16) for _ in range(2)]
    mlp = GatedMlp(
        Norm(np.ones(64, np.float32), 1e-5),
        backend.load_weight("gate_up", gate_up),
        "silu",
        backend.load_weight("down", gate_up),
    )
    x = np.ones((1, 64), np.float32)
    out, both = np.empty((1, intermediate), np.float32), np.empty((1, 2 * intermediate), np.float32)
    backend.norm_gate_up_act(out, both, np.empty_like(x), x, mlp)
    assert ran == ["norm_gate_up_act", *(OPS["norm_gate_up_act"].fuses if composed else ())]
