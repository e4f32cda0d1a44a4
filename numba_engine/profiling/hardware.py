"""GPUs as their datasheets describe them, number formats, and published energies: the constants of the planner.

Arithmetic rates are dense (vendors also print rates for 2:4 sparse matrices, twice as high) and, where a GPU has more
than one, those that accumulate in float32. Memory sizes are what the vendor calls GB and means as GiB; bandwidths and
rates are decimal. Link bandwidths are one way; vendors print the sum of both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from numba_engine.errors import ConfigError
from numba_engine.formats import FORMATS

GIB = 1 << 30
MIB = 1 << 20

Arithmetic = Literal["fp32", "fp16", "fp8", "int8", "fp4"]


# ---- number formats --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How weights or keys and values are stored, and which units multiply them."""

    name: str
    bits: float
    """Bits a value, scales included."""
    arithmetic: Arithmetic
    """The type of the multiplication; a GPU without units for fp8 or fp4 widens to fp16."""
    layout: str

    def nbytes(self, num_values: float) -> float:
        return num_values * self.bits / 8


def _formats(*formats: NumberFormat) -> MappingProxyType[str, NumberFormat]:
    return MappingProxyType({format.name: format for format in formats})


def _ggml(name: str, block_size: int, block_bytes: int) -> NumberFormat:
    layout = f"ggml: {block_size} values in {block_bytes} bytes"
    return NumberFormat(name.lower(), 8 * block_bytes / block_size, "int8", layout)


WEIGHT_FORMATS = _formats(
    NumberFormat("fp32", 32, "fp32", "IEEE binary32, multiplied outside the tensor cores"),
    NumberFormat("fp16", 16, "fp16", "IEEE binary16"),
    NumberFormat("bf16", 16, "fp16", "bfloat16, as fast as fp16"),
    NumberFormat("fp8", 8, "fp8", "e4m3 or e5m2, one scale a tensor"),
    NumberFormat("int8", 8, "int8", "int8, one scale a row"),
    *(_ggml(format.name, format.block_size, format.block_bytes) for format in FORMATS.values() if format.is_quantized),
    _ggml("Q5_K", 256, 176),
    NumberFormat("int4", 4.125, "fp16", "GPTQ, AWQ: 128 nibbles and a float16 scale; widened to fp16"),
    NumberFormat("mxfp4", 4.25, "fp4", "OCP MX: 32 e2m1 and an e8m0 scale"),
    NumberFormat("nvfp4", 4.5, "fp4", "16 e2m1 and an e4m3 scale"),
)
KV_FORMATS = _formats(
    *(WEIGHT_FORMATS[name] for name in ("fp32", "fp16", "bf16", "fp8", "int8", "q8_0", "q4_1", "q4_0"))
)


def find_format(name: str, formats: MappingProxyType[str, NumberFormat], what: str) -> NumberFormat:
    """Raises ConfigError naming the known formats."""
    format = formats.get(name.lower())
    if format is None:
        raise ConfigError(f"{what} must be one of {', '.join(formats)}, got {name!r}")
    return format


def stored_format(label: str) -> NumberFormat:
    """By the name of a ``Format``."""
    return WEIGHT_FORMATS[{"F32": "fp32", "F16": "fp16"}.get(label, label.lower())]


# ---- links -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    """What joins the GPUs of one machine."""

    name: str
    gbps: float
    """One way, of one GPU to all others together."""
    latency_s: float
    """One step from GPU to GPU."""
    max_gpus: int


_NVLINK_STEP_S = 0.47e-6
_PCIE_STEP_S = 1.0e-6
LINK_LATENCY_SOURCE = "NVIDIA NCCL, src/graph/tuning.cc: ring LL, 0.47 µs a step on NVLink, 1.0 µs on PCIe"


def _nvlink(name: str, gbps: float, max_gpus: int = 8) -> Link:
    return Link(name, gbps, _NVLINK_STEP_S, max_gpus)


_PCIE_4 = Link("PCIe 4.0 x16", 32.0, _PCIE_STEP_S, 8)
_PCIE_5 = Link("PCIe 5.0 x16", 64.0, _PCIE_STEP_S, 8)
_INFINITY_FABRIC = Link("Infinity Fabric, 7 links", 448.0, _NVLINK_STEP_S, 8)


# ---- GPUs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredArithmetic:
    """How fast this machine multiplies matrices of one format, as this engine does it."""

    tflops: float
    instruction: str
    """That does it."""
    arithmetic: Arithmetic
    """Of the format."""

    def bounds(self, arithmetic: Arithmetic) -> bool:
        """Fewer bits are multiplied at least as fast; a CPU widens fp8 and fp4."""
        slowest_first = ("fp32", "fp16", "int8")
        asked = arithmetic if arithmetic in slowest_first else "fp16"
        return slowest_first.index(asked) <= slowest_first.index(self.arithmetic)


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator by its datasheet. A rate is None where there are no such units, or it is not known."""

    key: str
    name: str
    memory_bytes: int
    memory_kind: str
    bandwidth_gbps: float
    fp16_tflops: float | None
    """Tensor cores, fp16 and bf16."""
    fp8_tflops: float | None
    int8_tops: float | None
    fp4_tflops: float | None
    shader_fp32_tflops: float | None
    """Outside the tensor cores."""
    shader_fp16_tflops: float | None
    """Outside the tensor cores."""
    l2_bytes: int | None
    tdp_w: float | None
    links: tuple[Link, ...]
    """Fastest first."""
    source: str
    bandwidth_source: Literal["datasheet", "measured"] = "datasheet"
    measured: MeasuredArithmetic | None = None
    """Instead of the datasheet's rates."""

    def peak_flops(self, arithmetic: Arithmetic) -> float | None:
        """Multiplications and additions a second; fp8 and fp4 fall back to fp16 where there are no units for them."""
        if self.measured is not None:
            return self.measured.tflops * 1e12 if self.measured.bounds(arithmetic) else None
        rates = {
            "fp32": self.shader_fp32_tflops,
            "fp16": self.fp16_tflops,
            "fp8": self.fp8_tflops or self.fp16_tflops,
            "int8": self.int8_tops,
            "fp4": self.fp4_tflops or self.fp16_tflops,
        }
        rate = rates[arithmetic]
        return rate * 1e12 if rate is not None else None

    def attention_flops(self, matrices: Arithmetic) -> float | None:
        """Attention multiplies in fp16 whatever the weights are; where that rate was not measured, theirs stands in."""
        return self.peak_flops("fp16") or self.peak_flops(matrices)

    @property
    def max_gpus(self) -> int:
        """That a link of the table joins."""
        return max((link.max_gpus for link in self.links), default=1)

    def link(self, num_gpus: int) -> Link:
        """The fastest that joins so many. Raises ConfigError where none does."""
        for link in self.links:
            if num_gpus <= link.max_gpus:
                return link
        raise ConfigError(f"tp must be at most {self.max_gpus} on {self.name}, got {num_gpus}")


_ADA = "NVIDIA Ada GPU Architecture whitepaper v2.02, appendix A"
_ADA_PRO = "NVIDIA Ada Lovelace professional GPU architecture whitepaper (L2)"
_AMPERE_GA102 = "NVIDIA Ampere GA102 GPU Architecture whitepaper v2.1, appendix A"
_A100 = "NVIDIA A100 Tensor Core GPU Architecture whitepaper v1.0, table 4; A100 datasheet"
_H100 = "NVIDIA H100 Tensor Core GPU Architecture whitepaper v1.04, tables 2 and 3; H100 datasheet"
_RTX_BLACKWELL = "NVIDIA RTX Blackwell GPU Architecture whitepaper v1.1, appendix A"

_GPUS = (
    Gpu(
        key="rtx3090", name="NVIDIA GeForce RTX 3090", memory_bytes=24 * GIB, memory_kind="GDDR6X", bandwidth_gbps=936,
        fp16_tflops=71, fp8_tflops=None, int8_tops=284, fp4_tflops=None, shader_fp32_tflops=35.6,
        shader_fp16_tflops=35.6, l2_bytes=6 * MIB, tdp_w=350,
        links=(_nvlink("NVLink 3 bridge", 56.25, 2), _PCIE_4), source=_AMPERE_GA102,
    ),
    Gpu(
        key="rtx4090", name="NVIDIA GeForce RTX 4090", memory_bytes=24 * GIB, memory_kind="GDDR6X", bandwidth_gbps=1008,
        fp16_tflops=165.2, fp8_tflops=330.3, int8_tops=660.6, fp4_tflops=None, shader_fp32_tflops=82.6,
        shader_fp16_tflops=82.6, l2_bytes=72 * MIB, tdp_w=450, links=(_PCIE_4,), source=_ADA,
    ),
    Gpu(
        key="rtx5090", name="NVIDIA GeForce RTX 5090", memory_bytes=32 * GIB, memory_kind="GDDR7", bandwidth_gbps=1792,
        fp16_tflops=209.5, fp8_tflops=419, int8_tops=838, fp4_tflops=1676, shader_fp32_tflops=104.8,
        shader_fp16_tflops=104.8, l2_bytes=96 * MIB, tdp_w=575, links=(_PCIE_5,), source=_RTX_BLACKWELL,
    ),
    Gpu(
        key="l4", name="NVIDIA L4", memory_bytes=24 * GIB, memory_kind="GDDR6", bandwidth_gbps=300,
        fp16_tflops=121, fp8_tflops=242.5, int8_tops=242.5, fp4_tflops=None, shader_fp32_tflops=30.3,
        shader_fp16_tflops=30.3, l2_bytes=48 * MIB, tdp_w=72, links=(_PCIE_4,),
        source=f"NVIDIA L4 datasheet (sparse rates halved); {_ADA_PRO}",
    ),
    Gpu(
        key="l40s", name="NVIDIA L40S", memory_bytes=48 * GIB, memory_kind="GDDR6", bandwidth_gbps=864,
        fp16_tflops=362.05, fp8_tflops=733, int8_tops=733, fp4_tflops=None, shader_fp32_tflops=91.6,
        shader_fp16_tflops=91.6, l2_bytes=96 * MIB, tdp_w=350, links=(_PCIE_4,),
        source=f"NVIDIA L40S datasheet; {_ADA_PRO}",
    ),
    Gpu(
        key="rtx6000ada", name="NVIDIA RTX 6000 Ada", memory_bytes=48 * GIB, memory_kind="GDDR6", bandwidth_gbps=960,
        fp16_tflops=364.25, fp8_tflops=728.5, int8_tops=728.5, fp4_tflops=None, shader_fp32_tflops=91.1,
        shader_fp16_tflops=91.1, l2_bytes=96 * MIB, tdp_w=300, links=(_PCIE_4,),
        source=f"NVIDIA RTX 6000 Ada datasheet (1,457 TFLOPS fp8 sparse, halved; fp16 half of that); {_ADA_PRO}",
    ),
    Gpu(
        key="rtxpro6000", name="NVIDIA RTX PRO 6000 Blackwell", memory_bytes=96 * GIB, memory_kind="GDDR7",
        bandwidth_gbps=1792, fp16_tflops=500, fp8_tflops=1000, int8_tops=1000, fp4_tflops=2000, shader_fp32_tflops=125,
        shader_fp16_tflops=125, l2_bytes=128 * MIB, tdp_w=600, links=(_PCIE_5,),
        source="NVIDIA RTX PRO 6000 Blackwell Workstation datasheet (4,000 TOPS fp4 sparse, halved; fp8 a half, fp16 a "
        "quarter of that)",
    ),
    Gpu(
        key="a100-40gb", name="NVIDIA A100 40GB SXM", memory_bytes=40 * GIB, memory_kind="HBM2", bandwidth_gbps=1555,
        fp16_tflops=312, fp8_tflops=None, int8_tops=624, fp4_tflops=None, shader_fp32_tflops=19.5,
        shader_fp16_tflops=78, l2_bytes=40 * MIB, tdp_w=400, links=(_nvlink("NVLink 3", 300),), source=_A100,
    ),
    Gpu(
        key="a100-80gb", name="NVIDIA A100 80GB SXM", memory_bytes=80 * GIB, memory_kind="HBM2E", bandwidth_gbps=2039,
        fp16_tflops=312, fp8_tflops=None, int8_tops=624, fp4_tflops=None, shader_fp32_tflops=19.5,
        shader_fp16_tflops=78, l2_bytes=40 * MIB, tdp_w=400, links=(_nvlink("NVLink 3", 300),), source=_A100,
    ),
    Gpu(
        key="h100-pcie", name="NVIDIA H100 PCIe", memory_bytes=80 * GIB, memory_kind="HBM2E", bandwidth_gbps=2039,
        fp16_tflops=756.5, fp8_tflops=1513, int8_tops=1513, fp4_tflops=None, shader_fp32_tflops=51.2,
        shader_fp16_tflops=102.4, l2_bytes=50 * MIB, tdp_w=350,
        links=(_nvlink("NVLink 4 bridge", 300, 2), _PCIE_5), source=_H100,
    ),
    Gpu(
        key="h100-sxm", name="NVIDIA H100 SXM", memory_bytes=80 * GIB, memory_kind="HBM3", bandwidth_gbps=3352,
        fp16_tflops=989.4, fp8_tflops=1978.9, int8_tops=1978.9, fp4_tflops=None, shader_fp32_tflops=66.9,
        shader_fp16_tflops=133.8, l2_bytes=50 * MIB, tdp_w=700, links=(_nvlink("NVLink 4", 450),), source=_H100,
    ),
    Gpu(
        key="h200", name="NVIDIA H200 SXM", memory_bytes=141 * GIB, memory_kind="HBM3E", bandwidth_gbps=4800,
        fp16_tflops=989.4, fp8_tflops=1978.9, int8_tops=1978.9, fp4_tflops=None, shader_fp32_tflops=66.9,
        shader_fp16_tflops=133.8, l2_bytes=50 * MIB, tdp_w=700, links=(_nvlink("NVLink 4", 450),),
        source=f"NVIDIA H200 datasheet (memory, TDP); rates and L2 of the same die: {_H100}",
    ),
    Gpu(
        key="b200", name="NVIDIA B200", memory_bytes=180 * GIB, memory_kind="HBM3E", bandwidth_gbps=7700,
        fp16_tflops=2250, fp8_tflops=4500, int8_tops=4500, fp4_tflops=9000, shader_fp32_tflops=75,
        shader_fp16_tflops=None, l2_bytes=126 * MIB, tdp_w=1000, links=(_nvlink("NVLink 5", 900),),
        source="NVIDIA Blackwell datasheet, one GPU of HGX B200 (sparse rates halved; earlier papers print 8 TB/s); L2 "
        "as cudaGetDeviceProperties reports it",
    ),
    Gpu(
        key="mi300x", name="AMD Instinct MI300X", memory_bytes=192 * GIB, memory_kind="HBM3", bandwidth_gbps=5300,
        fp16_tflops=1307.4, fp8_tflops=2614.9, int8_tops=2614.9, fp4_tflops=None, shader_fp32_tflops=163.4,
        shader_fp16_tflops=None, l2_bytes=32 * MIB, tdp_w=750, links=(_INFINITY_FABRIC,),
        source="AMD Instinct MI300X data sheet; AMD CDNA 3 whitepaper (L2: 4 MB a die; besides, 256 MB Infinity "
        "Cache). Link latency as NVLink's",
    ),
    Gpu(
        key="mi325x", name="AMD Instinct MI325X", memory_bytes=256 * GIB, memory_kind="HBM3E", bandwidth_gbps=6000,
        fp16_tflops=1307.4, fp8_tflops=2614.9, int8_tops=2614.9, fp4_tflops=None, shader_fp32_tflops=163.4,
        shader_fp16_tflops=None, l2_bytes=32 * MIB, tdp_w=1000, links=(_INFINITY_FABRIC,),
        source="AMD Instinct MI325X data sheet; AMD CDNA 3 whitepaper (L2: 4 MB a die; besides, 256 MB Infinity "
        "Cache). Link latency as NVLink's",
    ),
)  # fmt: skip
GPUS = MappingProxyType({gpu.key: gpu for gpu in _GPUS})
_ALIASES = MappingProxyType(
    {"a100": "a100-80gb", "h100": "h100-sxm", "h200-sxm": "h200", "rtx6000": "rtx6000ada", "4090": "rtx4090",
     "5090": "rtx5090", "3090": "rtx3090",
     # As the driver calls them.
     "NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100-sxm", "NVIDIA H100": "h100-sxm", "NVIDIA B200": "b200",
     "NVIDIA A100-SXM4-80GB": "a100-80gb", "NVIDIA A100-SXM4-40GB": "a100-40gb",
     "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
     "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000"}
)  # fmt: skip


def find_gpu(name: str) -> Gpu:
    """By key, ignoring case, spaces, hyphens and underscores. Raises ConfigError listing the known ones."""
    wanted = _plain(name)
    for key, gpu in GPUS.items():
        if wanted in (_plain(key), _plain(gpu.name)):
            return gpu
    for alias, key in _ALIASES.items():
        if wanted == _plain(alias):
            return GPUS[key]
    raise ConfigError(f"no GPU {name!r} in the table; known are {', '.join(GPUS)}")


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def measured_machine(
    name: str, bandwidth_gbps: float, memory_bytes: int, measured: MeasuredArithmetic | None = None
) -> Gpu:
    """A machine known by measurement alone. Without an arithmetic rate only memory bounds anything."""
    if not (math.isfinite(bandwidth_gbps) and bandwidth_gbps > 0):
        raise ConfigError(f"the measured bandwidth must be a positive number of GB/s, got {bandwidth_gbps!r}")
    return Gpu(
        key="this-machine", name=name, memory_bytes=memory_bytes, memory_kind="DRAM", bandwidth_gbps=bandwidth_gbps,
        fp16_tflops=None, fp8_tflops=None, int8_tops=None, fp4_tflops=None, shader_fp32_tflops=None,
        shader_fp16_tflops=None, l2_bytes=None, tdp_w=None, links=(),
        source=f"read bandwidth{' and arithmetic' if measured else ''} measured here",
        bandwidth_source="measured", measured=measured,
    )  # fmt: skip


# ---- energy ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EnergyFigure:
    """A published energy a bit moved, or a multiply-add done: an estimate for any particular chip."""

    picojoules: float
    source: str
    detail: str
    """What the source says, and where it stands in for something else."""


_MICRON = "Micron, Ultra-Bandwidth Solutions: memory comparison, average device power"
_HOROWITZ = "Horowitz, Computing's Energy Problem, ISSCC 2014, figure 1.1.9 (45 nm, 0.9 V; newer chips need less)"

MEMORY_ENERGY = MappingProxyType(
    {
        "GDDR6": EnergyFigure(7.5, _MICRON, "its figure"),
        "GDDR6X": EnergyFigure(7.25, _MICRON, "its figure"),
        "GDDR7": EnergyFigure(7.25, _MICRON, "the figure of GDDR6X"),
        "HBM2": EnergyFigure(6.0, _MICRON, "the figure of HBM2E"),
        "HBM2E": EnergyFigure(6.0, _MICRON, "its figure"),
        "HBM3": EnergyFigure(6.0, _MICRON, "the figure of HBM2E"),
        "HBM3E": EnergyFigure(6.0, _MICRON, "the figure of HBM2E"),
        "DRAM": EnergyFigure(1300 / 64, _HOROWITZ, "64 bits from DRAM, 1.3 nJ at least"),
    }
)
"""A bit between the memory device and the GPU."""

L2_ENERGY = EnergyFigure(100 / 64, _HOROWITZ, "64 bits from a 1 MB SRAM, 100 pJ")
SHARED_MEMORY_ENERGY = EnergyFigure(20 / 64, _HOROWITZ, "64 bits from a 32 kB SRAM, 20 pJ")
REGISTER_ENERGY = EnergyFigure(10 / 64, _HOROWITZ, "64 bits from an 8 kB SRAM, 10 pJ")
MULTIPLY_ADD_ENERGY: MappingProxyType[Arithmetic, EnergyFigure] = MappingProxyType(
    {
        "fp32": EnergyFigure(3.7 + 0.9, _HOROWITZ, "fp32 multiply 3.7 pJ, add 0.9 pJ"),
        "fp16": EnergyFigure(1.1 + 0.4, _HOROWITZ, "fp16 multiply 1.1 pJ, add 0.4 pJ"),
        "fp8": EnergyFigure(1.1 + 0.4, _HOROWITZ, "the figures of fp16"),
        "int8": EnergyFigure(0.2 + 0.1, _HOROWITZ, "int8 multiply 0.2 pJ, int32 add 0.1 pJ"),
        "fp4": EnergyFigure(1.1 + 0.4, _HOROWITZ, "the figures of fp16"),
    }
)

NEAR_MEMORY_BANDWIDTH_FACTOR = 4.0
NEAR_MEMORY_SOURCE = (
    "Lee et al., Hardware Architecture and Software Stack for PIM Based on Commercial DRAM Technology, ISCA 2021 "
    "(Samsung HBM-PIM: four times the bandwidth inside the stack; one multiply-add a value read)"
)
