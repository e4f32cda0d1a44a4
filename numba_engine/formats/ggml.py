"""The formats of ggml, as data (ggml-common.h, ggml-quants.c)."""

from __future__ import annotations

import hashlib

from numba_engine.formats import encoders
from numba_engine.formats.descriptor import Bits, Codes, Field, Format, Scales


def _nibbles(at: int, count: int, half: int) -> Field:
    """Four bits a value: ``half`` bytes hold 2·half values, the first of them in the low nibbles."""
    return tuple((Bits(at + i // (2 * half) * half + i % half, 4 * (i // half % 2), 4),) for i in range(count))


def _q6_k_code(i: int) -> tuple[Bits, Bits]:
    """Halves of 128 values: the low nibbles of 64 bytes, then the high ones; 2 high bits of each from 32 bytes."""
    half, i = divmod(i, 128)
    return Bits(64 * half + i % 64, 4 * (i // 64), 4), Bits(128 + 32 * half + i % 32, 2 * (i // 32), 2)


F32 = Format("F32", 1, 4, "f32")
F16 = Format("F16", 1, 2, "f16")
BF16 = Format("BF16", 1, 2, "bf16")
Q8_0 = Format(
    "Q8_0",  # w = d·q
    32,
    34,
    codes=Codes(8, tuple((Bits(2 + i, 0, 8),) for i in range(32)), signed=True),
    scales=Scales(0, 32),
    encode=encoders.q8_0,
)
Q4_0 = Format(
    "Q4_0",  # w = d·(q − 8)
    32,
    18,
    codes=Codes(4, _nibbles(2, 32, 16), zero=8),
    scales=Scales(0, 32),
    encode=encoders.q4_0,
)
Q4_1 = Format(
    "Q4_1",  # w = d·q + m
    32,
    20,
    codes=Codes(4, _nibbles(4, 32, 16)),
    scales=Scales(0, 32),
    minima=Scales(2, 32),
    encode=encoders.q4_1,
)
Q4_K = Format(
    "Q4_K",  # w = d·scale·q − dmin·minimum, 6 bits per scale and per minimum of 32 values
    256,
    144,
    codes=Codes(4, _nibbles(16, 256, 32)),
    scales=Scales(
        0, 32, tuple((Bits(4 + j, 0, 6),) if j < 4 else (Bits(8 + j, 0, 4), Bits(j, 6, 2)) for j in range(8))
    ),
    minima=Scales(
        2,
        32,
        tuple((Bits(8 + j, 0, 6),) if j < 4 else (Bits(8 + j, 4, 4), Bits(4 + j, 6, 2)) for j in range(8)),
        sign=-1,
    ),
    encode=encoders.q4_k,
)
Q6_K = Format(
    "Q6_K",  # w = d·scale·(q − 32), 8 bits per scale of 16 values
    256,
    210,
    codes=Codes(6, tuple(_q6_k_code(i) for i in range(256)), zero=32),
    scales=Scales(208, 16, tuple((Bits(192 + j, 0, 8),) for j in range(16)), fine_signed=True),
    encode=encoders.q6_k,
)

FORMATS = {format.name: format for format in (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K)}


def label(format: Format) -> str:
    """For names of kernels and of what is kept of them: the format's; of one that is not here, its content too."""
    if FORMATS.get(format.name) is format:
        return format.name.lower()
    made_of = repr((format.block_size, format.block_bytes, format.codes, format.scales, format.minima))
    return f"{format.name.lower()}_{hashlib.sha256(made_of.encode()).hexdigest()[:8]}"
