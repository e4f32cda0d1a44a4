"""numba_engine: an LLM inference engine whose GPU kernels are written in numba.cuda."""

from __future__ import annotations
