"""numba_engine: an LLM inference engine whose GPU kernels are written in numba.cuda.

>>> from numba_engine import LLM, SamplingParams
>>> llm = LLM("demo")
>>> llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))[0].text
"""

from __future__ import annotations

from numba_engine.backends.instruments import CountedTraffic, TimeSource
from numba_engine.checkpoint import Progress
from numba_engine.config import EngineConfig
from numba_engine.engine.llm import LLM, Prompt
from numba_engine.engine.validation import ValidRequest
from numba_engine.errors import (
    BackendUnavailableError,
    CheckpointError,
    ConfigError,
    FieldViolation,
    InvalidRequestError,
    NonFiniteLogitsError,
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
from numba_engine.profiling.bounds import Bound as PlanBound
from numba_engine.profiling.bounds import MemoryNeed
from numba_engine.profiling.bounds import Phase as PlannedPhase
from numba_engine.profiling.hardware import Gpu
from numba_engine.profiling.levers import Lever
from numba_engine.profiling.planned_model import PlannedModel
from numba_engine.profiling.planner import estimate_throughput, machine_of, model_of_config, model_of_size
from numba_engine.profiling.report import (
    MemoryUse,
    OpBound,
    OpCall,
    OpProfile,
    Peaks,
    ProfileSummary,
    StepProfile,
)
from numba_engine.profiling.roofline import Estimate
from numba_engine.profiling.synthetic import longest_context
from numba_engine.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "BackendUnavailableError",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "CountedTraffic",
    "EngineConfig",
    "EngineStats",
    "Estimate",
    "FieldViolation",
    "FinishReason",
    "Gpu",
    "InvalidRequestError",
    "Lever",
    "MemoryNeed",
    "MemoryUse",
    "ModelInfo",
    "NonFiniteLogitsError",
    "NumbaEngineError",
    "OpBound",
    "OpCall",
    "OpProfile",
    "OutOfMemoryError",
    "Peaks",
    "PlanBound",
    "PlannedModel",
    "PlannedPhase",
    "PositionLogprobs",
    "ProfileSummary",
    "Progress",
    "Prompt",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "StepProfile",
    "TimeSource",
    "Timings",
    "TokenLogprob",
    "UnsupportedModelError",
    "Usage",
    "ValidRequest",
    "estimate_throughput",
    "longest_context",
    "machine_of",
    "model_of_config",
    "model_of_size",
]
