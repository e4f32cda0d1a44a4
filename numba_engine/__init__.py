"""numba_engine: an LLM inference engine whose GPU kernels are written in numba.cuda.

>>> from numba_engine import LLM, SamplingParams
>>> llm = LLM("demo")
>>> llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))[0].text
"""

from __future__ import annotations

from numba_engine.checkpoint import Progress
from numba_engine.config import EngineConfig
from numba_engine.engine import LLM, Prompt
from numba_engine.errors import (
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    FieldViolation,
    InvalidRequestError,
    NumbaEngineError,
    OutOfMemoryError,
    QueueFullError,
    UnsupportedModelError,
)
from numba_engine.outputs import (
    Completion,
    EngineStats,
    FinishReason,
    ModelInfo,
    PositionLogprobs,
    RequestOutput,
    Timings,
    TokenLogprob,
    Usage,
)
from numba_engine.profiling.report import OpProfile, ProfileSummary, StepProfile
from numba_engine.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "BackendUnavailableError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "EngineConfig",
    "EngineStats",
    "FieldViolation",
    "FinishReason",
    "InvalidRequestError",
    "ModelInfo",
    "NumbaEngineError",
    "OpProfile",
    "OutOfMemoryError",
    "PositionLogprobs",
    "ProfileSummary",
    "Progress",
    "Prompt",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "StepProfile",
    "Timings",
    "TokenLogprob",
    "UnsupportedModelError",
    "Usage",
]
