"""softcap · tanh(x / softcap), of scores and of logits (Gemma 2)."""

from __future__ import annotations

from typing import Any

from numba import cuda
from numba.cuda.types import float32

from numba_engine.backends.cuda.kernels.intrinsics import divide, exp2, fma

LOG2_E = 1.4426950408889634


@cuda.jit(device=True, inline="always")
def soft_capped(x, softcap, log2_factor):  # type: ignore[no-untyped-def]
    """To a few 1e-7 of softcap: tanh(y) = 1 - 2 / (1 + e^2y), and e^2y = 2^(x · log2_factor)."""
    below_one = divide(float32(2), float32(float32(1) + exp2(float32(x * log2_factor))))
    return fma(float32(-softcap), below_one, softcap)


def score_capper(softcap: float | None) -> Any:
    """A function of a score in base 2, that is times log2 e: the same of the capped score. None without a softcap."""
    if softcap is None:
        return None
    log2_softcap, log2_factor = softcap * LOG2_E, 2 / softcap

    @cuda.jit(device=True)  # left to LLVM to inline: numba takes minutes to in a kernel of this size
    def cap(score):  # type: ignore[no-untyped-def]
        return soft_capped(score, float32(log2_softcap), float32(log2_factor))

    return cap


def name_with(softcap: float | None, name: str) -> str:
    """Of a kernel whose code holds a softcap."""
    return name if softcap is None else f"{name}_c{softcap:g}".replace(".", "p").replace("-", "m").replace("+", "")
