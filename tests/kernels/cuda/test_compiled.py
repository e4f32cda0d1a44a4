"""What the compiled PTX looks like, and what the backend says where it cannot run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from numba_engine.backends.cuda import availability
from numba_engine.backends.cuda.compiler import Kernel, compile_kernel
from numba_engine.backends.cuda.kernels.decode_attention import decode_attention_kernel
from numba_engine.backends.cuda.kernels.fma_attention import fma_attention_kernel
from numba_engine.backends.cuda.kernels.gemm import gemm_kernel
from numba_engine.backends.cuda.kernels.linear import linear_kernel
from numba_engine.backends.cuda.kernels.linear_f32 import linear_f32_kernel
from numba_engine.backends.cuda.kernels.prefill_attention import prefill_attention_kernel
from numba_engine.backends.cuda.kernels.sample import sample_kernel
from numba_engine.backends.cuda.kernels.unrolling import static_range, unroll
from numba_engine.backends.cuda.ptxas import assemble, find_ptxas
from numba_engine.errors import BackendUnavailableError
from numba_engine.formats import BF16, Q4_1, Q8_0, Format
from numba_engine.kernel_lab.cards import occupancy, ptx_counts


@pytest.mark.parametrize("format", [BF16, Q4_1], ids=lambda f: f.name)
def test_linear_holds_its_loads_in_flight_and_nothing_slow(format: Format) -> None:
    """The loads of three steps are issued, past L1, before x is looked at."""
    compiled = compile_kernel(linear_kernel(format, 1), (9, 0))
    assert ptx_counts(compiled) == {"f64": 0, "local": 0, "calls": 0}
    before = compiled.ptx[: re.search(r"ld\.global(?!\.nc\.L1::no_allocate)", compiled.ptx).start()]  # type: ignore[union-attr]
    assert len(re.findall(r"ld\.global\.nc\.L1::no_allocate\.L2::256B\.v4\.u32", before)) == 3 * 4
    assert not re.search(r"\b(mma|ld\.shared)\b|bar(rier)?\.sync", before)


def test_the_newer_compiler_of_blackwell_unrolls_as_well() -> None:
    """cc 10.0 goes through another LLVM, which gives up on other loops."""
    compiled = compile_kernel(linear_kernel(Q8_0, 16), (10, 0))
    assert ptx_counts(compiled) == {"f64": 0, "local": 0, "calls": 0}


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("is_half", [False, True])
def test_attention_keeps_its_tiles_in_registers(head_dim: int, is_half: bool) -> None:
    compiled = compile_kernel(fma_attention_kernel(head_dim, is_half), (8, 0))
    assert ptx_counts(compiled) == {"f64": 0, "local": 0, "calls": 0}


@pytest.mark.parametrize("cc", [(9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize(
    "kernel", [decode_attention_kernel(128, 8), prefill_attention_kernel(128)], ids=lambda k: k.name
)
def test_attention_on_tensor_cores_keeps_its_fragments_in_registers(kernel: Kernel, cc: tuple[int, int]) -> None:
    compiled = compile_kernel(kernel, cc)
    assert ptx_counts(compiled) == {"f64": 0, "local": 0, "calls": 0}
    assert re.search(r"\.extern \.shared \.align 16", compiled.ptx), "copies and matrices come 16 bytes at a time"
    if find_ptxas() is not None:
        assert assemble(compiled).spill_bytes == 0


def test_the_gemm_keeps_its_sums_in_registers() -> None:
    compiled = compile_kernel(gemm_kernel(BF16), (9, 0))
    assert ptx_counts(compiled) == {"f64": 0, "local": 0, "calls": 0}


def test_the_sampler_needs_no_float64() -> None:
    assert ptx_counts(compile_kernel(sample_kernel(), (8, 0))) == {"f64": 0, "local": 0, "calls": 0}


def test_the_inspection_sees_what_it_looks_for() -> None:
    compiled = replace(
        compile_kernel(sample_kernel(), (8, 0)), ptx="\tadd.f64 %fd1, %fd2;\n\tld.local.u32 %r;\n\tcall.uni foo;\n"
    )
    assert ptx_counts(compiled) == {"f64": 1, "local": 1, "calls": 1}


def test_occupancy_of_known_kernels() -> None:
    assert occupancy((9, 0), 256, 32, 0) == 1.0
    assert occupancy((9, 0), 256, 64, 16384) == 0.5  # 65536 / (64 × 256) = 4 blocks of 8 warps, of 64 warps
    assert occupancy((9, 0), 256, 168, 0) == 0.125
    assert occupancy((8, 9), 128, 32, 49152) == pytest.approx(2 * 4 / 48)  # shared memory allows two blocks


def test_loops_unroll_with_outer_indices_and_closure_variables() -> None:
    width = 3

    @unroll
    def pairs(out: list[tuple[int, int]]) -> None:
        for i in static_range(2):
            for j in static_range(i, width):
                out.append((i, j))

    found: list[tuple[int, int]] = []
    pairs(found)
    assert found == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    assert "static_range" not in pairs.__code__.co_names


@pytest.mark.parametrize(
    ("capability", "missing", "message"),
    [((7, 5), [], "8.0 or newer"), ((9, 0), ["cupy"], r"package cupy: pip install -e '.\[cuda13\]'")],
)
def test_unusable_gpus_are_explained(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], missing: list[str], message: str
) -> None:
    monkeypatch.setattr(availability, "_compute_capability", lambda: capability)
    monkeypatch.setattr(availability.importlib.util, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(BackendUnavailableError, match=message):
        availability.require_gpu()
    assert availability.why_no_gpu() is not None


def test_a_machine_without_a_driver_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(availability.ctypes, "CDLL", no_library)
    availability._compute_capability.cache_clear()
    with pytest.raises(BackendUnavailableError, match="was not found"):
        availability.require_gpu()
    availability._compute_capability.cache_clear()


def test_no_kernel_is_compiled_twice() -> None:
    kernel = linear_f32_kernel(1)
    assert kernel is linear_f32_kernel(1)
    assert compile_kernel(kernel, (9, 0)) is compile_kernel(kernel, (9, 0))
