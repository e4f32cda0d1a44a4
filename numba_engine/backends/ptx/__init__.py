"""The PTX executor: compiled CUDA kernels run, checked and counted without a GPU.

``parser`` reads the text; ``program`` lays a kernel out, with calls made away with (``inlining``), basic blocks in the
order they run (``cfg``) and registers in shared buffers (``registers``); ``binding`` gives it arrays for a number of
blocks and threads, and ``machine`` runs it. ``semantics`` says what each opcode does, ``memory`` and ``control`` check,
``counters`` count, ``device`` is the driver's seam.

What is not modelled: time; the weak memory model (all lanes of a batch see memory in program order, atomics take turns
by lane); the last bits of approximate functions (they are correctly rounded here); textures, clusters, tensor maps,
``wgmma``. An opcode or form that is not known is an error that quotes the line.
"""

from __future__ import annotations

from numba_engine.backends.ptx.binding import Checks
from numba_engine.backends.ptx.counters import ArrayCounters, LaunchCounters, Traffic
from numba_engine.backends.ptx.device import LoadedKernel, PtxArray, PtxDevice
from numba_engine.backends.ptx.errors import PtxError

__all__ = ["ArrayCounters", "Checks", "LaunchCounters", "LoadedKernel", "PtxArray", "PtxDevice", "PtxError", "Traffic"]
