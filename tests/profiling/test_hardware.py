"""The table of GPUs and formats: what the articles and datasheets say, and that nothing in it contradicts itself."""

from __future__ import annotations

import math

import pytest

from numba_engine.errors import ConfigError
from numba_engine.formats import F32, FORMATS, Format
from numba_engine.profiling.hardware import (
    GIB,
    GPUS,
    KV_FORMATS,
    L2_ENERGY,
    MEMORY_ENERGY,
    MIB,
    MULTIPLY_ADD_ENERGY,
    REGISTER_ENERGY,
    SHARED_MEMORY_ENERGY,
    WEIGHT_FORMATS,
    Gpu,
    MeasuredArithmetic,
    find_format,
    find_gpu,
    measured_machine,
)


def test_the_table_has_the_gpus_that_were_asked_for() -> None:
    assert set(GPUS) == {
        *("rtx3090", "rtx4090", "rtx5090", "l4", "l40s", "rtx6000ada", "rtxpro6000"),
        *("a100-40gb", "a100-80gb", "h100-pcie", "h100-sxm", "h200", "b200", "mi300x", "mi325x"),
    }


def test_an_rtx_4090_names_both_of_its_fp16_rates() -> None:
    gpu = GPUS["rtx4090"]
    assert (gpu.shader_fp16_tflops, gpu.fp16_tflops) == (82.6, 165.2)
    assert (gpu.bandwidth_gbps, gpu.memory_bytes, gpu.l2_bytes, gpu.tdp_w) == (1008, 24 * GIB, 72 * MIB, 450)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=list(GPUS))
def test_an_entry_is_plausible_and_cites_its_source(gpu: Gpu) -> None:
    assert gpu.source.startswith(("NVIDIA ", "AMD "))
    assert gpu.memory_kind in MEMORY_ENERGY
    assert gpu.fp16_tflops is not None
    assert gpu.shader_fp32_tflops is not None
    assert gpu.shader_fp32_tflops < gpu.fp16_tflops
    # Tensor cores double their rate when the numbers are half as long; int8 more than that on GeForce cards, whose
    # fp16 and fp8 are halved when they accumulate in float32.
    assert gpu.fp8_tflops is None or math.isclose(gpu.fp8_tflops / gpu.fp16_tflops, 2, rel_tol=0.02)
    assert gpu.int8_tops is not None
    assert gpu.int8_tops / gpu.fp16_tflops == pytest.approx(4 if "GeForce" in gpu.name else 2, rel=0.02)
    assert gpu.l2_bytes is not None
    assert 4 * MIB < gpu.l2_bytes < 256 * MIB < gpu.memory_bytes
    gbps = [link.gbps for link in gpu.links]
    assert gbps == sorted(gbps, reverse=True)
    assert gbps[0] < gpu.bandwidth_gbps
    assert find_gpu(gpu.name) is find_gpu(gpu.key.upper()) is gpu


@pytest.mark.parametrize("name", ["RTX 4090", "rtx-4090", "NVIDIA GeForce RTX 4090", "4090"])
def test_a_gpu_is_found_however_it_is_written(name: str) -> None:
    assert find_gpu(name) is GPUS["rtx4090"]


def test_an_unknown_gpu_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no GPU 'gtx970' in the table; known are rtx3090, .*, mi325x$"):
        find_gpu("gtx970")
    with pytest.raises(ConfigError, match="no GPU ''"):
        find_gpu("")


def test_fp8_is_widened_where_there_are_no_units_for_it() -> None:
    assert GPUS["a100-80gb"].peak_flops("fp8") == 312e12
    assert GPUS["h100-sxm"].peak_flops("fp8") == 1978.9e12
    assert GPUS["h100-sxm"].peak_flops("fp4") == 989.4e12
    assert GPUS["h100-sxm"].peak_flops("fp32") == pytest.approx(66.9e12)


def test_the_link_depends_on_how_many_gpus_it_joins() -> None:
    gpu = GPUS["rtx3090"]
    assert (gpu.link(2).name, gpu.link(4).name) == ("NVLink 3 bridge", "PCIe 4.0 x16")
    with pytest.raises(ConfigError, match="tp must be at most 8 on NVIDIA GeForce RTX 3090, got 9"):
        gpu.link(9)


@pytest.mark.parametrize("stored", [F32, *(format for format in FORMATS.values() if format.is_quantized)], ids=repr)
def test_formats_take_the_bits_that_the_engine_s_own_do(stored: Format) -> None:
    name = {"F32": "fp32"}.get(stored.name, stored.name.lower())
    assert WEIGHT_FORMATS[name].nbytes(4096) == stored.row_bytes(4096)


def test_an_unknown_format_is_an_error_that_lists_the_known_ones() -> None:
    assert find_format("FP16", WEIGHT_FORMATS, "weights").bits == 16
    with pytest.raises(ConfigError, match="kv must be one of fp32, fp16, bf16, fp8, int8, q8_0, q4_1, q4_0, got 'q9'"):
        find_format("q9", KV_FORMATS, "kv")


def test_moving_a_bit_costs_more_the_farther_it_comes() -> None:
    nearest_first = (REGISTER_ENERGY, SHARED_MEMORY_ENERGY, L2_ENERGY, *(MEMORY_ENERGY[k] for k in ("HBM2E", "GDDR6")))
    costs = [figure.picojoules for figure in nearest_first]
    assert costs == sorted(costs)
    assert set(MULTIPLY_ADD_ENERGY) == {format.arithmetic for format in WEIGHT_FORMATS.values()}


def test_a_measured_machine_has_bandwidth_and_no_arithmetic() -> None:
    machine = measured_machine("EPYC", 35.0, 24 * GIB)
    assert (machine.bandwidth_gbps, machine.bandwidth_source, machine.max_gpus) == (35.0, "measured", 1)
    assert machine.peak_flops("fp16") is None
    assert machine.peak_flops("fp8") is None
    int8 = measured_machine("EPYC", 35.0, 24 * GIB, MeasuredArithmetic(0.5, "int8 dot products", "int8"))
    assert (int8.peak_flops("int8"), int8.peak_flops("fp32")) == (0.5e12, 0.5e12)
    halves = measured_machine("EPYC", 35.0, 24 * GIB, MeasuredArithmetic(0.1, "bf16 dot products", "fp16"))
    assert (halves.peak_flops("int8"), halves.peak_flops("fp4"), halves.peak_flops("fp32")) == (None, 0.1e12, 0.1e12)
    floats = measured_machine("EPYC", 35.0, 24 * GIB, MeasuredArithmetic(0.1, "float32 fma", "fp32"))
    assert (floats.peak_flops("fp16"), floats.attention_flops("fp32")) == (None, 0.1e12)
    for bandwidth in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="positive number of GB/s"):
            measured_machine("EPYC", bandwidth, 24 * GIB)
