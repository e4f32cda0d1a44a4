"""What a device can do at most, and where that is from."""

from __future__ import annotations

import pytest

from numba_engine.backends.cpu.backend import CpuBackend
from numba_engine.config import EngineConfig
from numba_engine.formats import BF16, F16, Q4_0, Format
from numba_engine.profiling.hardware import GPUS
from numba_engine.profiling.peaks import peaks_of
from tests.profiling.idle_backend import FakeClock, IdleBackend


def idle(device_name: str, num_threads: int = 0) -> IdleBackend:
    backend = IdleBackend(FakeClock())
    backend.device_name, backend.num_threads = device_name, num_threads  # type: ignore[misc]
    return backend


@pytest.mark.parametrize(
    ("formats", "gflops", "arithmetic"),
    [
        (("Q4_1", "Q8_0", "F32"), 1_978_900 / 2, "int8 tensor cores, two planes"),
        (("BF16", "Q8_0"), 989_400 / 2, "fp16 tensor cores, two planes"),
    ],
)
def test_a_gpu_of_the_table_is_measured_for_its_memory_alone(
    formats: tuple[str, ...], gflops: float, arithmetic: str
) -> None:
    peaks = peaks_of(idle("NVIDIA H200 SXM"), formats)
    assert (peaks.read_bandwidth_gbps, peaks.read_bandwidth_source) == (10.0, "measured")
    assert (peaks.gflops, peaks.arithmetic, peaks.gflops_source) == (gflops, arithmetic, GPUS["h200"].source)
    assert peaks.ridge == pytest.approx(gflops / 10.0)
    assert peaks.launch_s == 0


@pytest.mark.parametrize(
    ("driver_name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_the_driver_s_names_are_known(driver_name: str, key: str) -> None:
    assert peaks_of(idle(driver_name), ("Q8_0",)).gflops_source == GPUS[key].source


def test_a_device_that_is_in_no_table_has_no_arithmetic_peak() -> None:
    peaks = peaks_of(idle("NVIDIA Whatever"), ("Q8_0",))
    assert (peaks.gflops, peaks.gflops_source, peaks.ridge) == (None, "unknown", None)
    assert peaks.arithmetic == "no datasheet of NVIDIA Whatever in the table"


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("activation_dtype", "format", "arithmetic"),
    [
        ("int8", Q4_0, "int8 dot products, two planes"),
        ("int8", BF16, "bf16 dot products"),
        ("int8", F16, "float32 fma"),
        ("float32", BF16, "float32 fma"),
    ],
)
def test_a_cpu_is_measured_as_it_multiplies(activation_dtype: str, format: Format, arithmetic: str) -> None:
    backend = CpuBackend(EngineConfig(backend="cpu", num_threads=1, activation_dtype=activation_dtype))  # type: ignore[arg-type]
    measured = backend.peak_gflops(format)
    assert measured[1].startswith(f"{arithmetic} (")
    assert 0.5 < measured[0] < 10_000  # of one core: anything from a busy small one to what is not built yet
